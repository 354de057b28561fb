"""The settings of a server, which are checked when they are created.

The command line creates them, and `create_app` and `run` read them; the environment is not read here. Sizes are in
bytes and times in seconds. `GET /info` shows `ServerLimits`.
"""

import ipaddress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from fp8serve.engine.defaults import TRAINING_GPU_MEMORY_FRACTION, with_device
from fp8serve.engine.options import EngineOptions
from fp8serve.errors import MachineError, RequestError, shown
from fp8serve.logs import LogFormat
from fp8serve.options import AUTO, About, check, http_address, options_of
from fp8serve.server.named_models import NamedAdapter, NamedModel, check_name
from fp8serve.server.output_parsers.output_format import OutputFormat, ReasoningFormat, ToolFormat
from fp8serve.train.events import ReportTool, check_installed

TrainOn = Literal["refuse", "share", "pause"]
Count = Annotated[int, Ge(1)]
Seconds = Annotated[float, Gt(0)]
KEY_VARIABLE = "FP8SERVE_API_KEY"


@dataclass(frozen=True)
class ServerLimits:
    """Limits for each request and for all requests together."""

    body_bytes: Annotated[Count, About("Bytes of one request's body.")] = 8 << 20
    held_bytes: Annotated[Count, About("Bytes of all request bodies together.")] = 256 << 20
    header_bytes: Annotated[Count, About("Bytes of one request's headers.")] = 64 << 10
    upload_bytes: Annotated[Count, About("Bytes of an uploaded file, also after decompression.")] = 1 << 30
    body_seconds: Annotated[Seconds, About("Seconds for a body to arrive.")] = 30.0
    header_seconds: Annotated[Seconds, About("Seconds for the headers to arrive.")] = 10.0
    send_seconds: Annotated[Seconds, About("Seconds for a client to receive a chunk of its response.")] = 60.0
    queue: Annotated[Count, About("Sequences that wait to enter the running batch.")] = 256
    queue_tokens: Annotated[
        Count, About("Tokens of all admitted sequences: prompt plus the most that may be generated.")
    ] = 1 << 20
    n: Annotated[Count, About("Choices for one prompt.")] = 128
    prompts: Annotated[Count, About("Prompts of one request.")] = 64
    prompt_logprobs: Annotated[
        Count, About("Log-probabilities of the tokens of one request's prompts and of their alternatives.")
    ] = 1 << 18
    texts: Annotated[Count, About("Texts of one request for embeddings or scores.")] = 2048
    chat_messages: Annotated[Count, About("Messages of one conversation.")] = 1024
    connections: Annotated[Count, About("Open connections, at most as many as the limit of open files allows.")] = 8192
    streams: Annotated[Count, About("Open event streams.")] = 512
    keep_alive_seconds: Annotated[Seconds, About("Seconds between two keep-alive comments in an event stream.")] = 15.0
    jobs_queued: Annotated[Count, About("Fine-tune jobs that are queued.")] = 32
    row_bytes: Annotated[Count, About("Bytes of one row of training data.")] = 1 << 20
    rows: Annotated[Count, About("Rows of a training data file.")] = 1_000_000
    reading_seconds: Annotated[Seconds, About("Processor seconds to validate, render and tokenize one request.")] = 30.0
    reading_memory: Annotated[Count, About("Bytes of memory to validate, render and tokenize one request.")] = 1 << 30
    reading_bytes: Annotated[Count, About("Bytes of requests that wait to be validated and tokenized.")] = 64 << 20
    template_seconds: Annotated[
        Seconds, About("Processor seconds to render a chat template; they count towards reading_seconds.")
    ] = 2.0
    validation_seconds: Annotated[Seconds, About("Processor seconds to check the rows of a fine-tune.")] = 600.0
    validation_memory: Annotated[
        Count, About("Bytes of memory to check the rows of a fine-tune; the same limit applies to a job's data.")
    ] = 8 << 30

    def __post_init__(self) -> None:
        check(self, RequestError)


@dataclass(frozen=True)
class Deadlines:
    """The deadlines of an engine process in seconds: to send a heartbeat, to finish a step, and to load the weights and
    generate a first token."""

    heartbeat: float
    step: float
    load: float


@dataclass(frozen=True, kw_only=True)
class Settings(EngineOptions):
    """The settings of one server: its models, engine options, address, access control, deadlines and limits.

    `train_on` decides about fine-tune jobs on the serving device: "refuse" them, "share" the device, or "pause" serving
    while a job runs. It has no effect if `train_device` names another device. For `allowed_hosts` see
    http/access_control.py. An engine that misses a deadline is restarted. Raises RequestError or MachineError for
    invalid values.
    """

    model: Path
    host: Annotated[
        str, About("Address to listen on; addresses other than this machine's own need a key.", private=True)
    ] = "127.0.0.1"
    port: Annotated[int, Ge(0), Le(65535), About("Port; 0 chooses a free one.", private=True)] = 8000
    api_key: Annotated[
        str | None,
        About(
            "Key that every request except health checks must have. Other programs of this machine can read it here; "
            f"{KEY_VARIABLE} in the environment and --api-key-file hide it.",
            unset="none",
            private=True,
        ),
    ] = field(default=None, repr=False)
    api_keys: Annotated[
        Path | None,
        About("File of keys with scopes, tenants and limits (docs/operating.md).", unset="none", private=True),
    ] = None
    allow_unauthenticated: Annotated[bool, About("Listen beyond this machine without a key.")] = False
    allowed_hosts: Annotated[
        tuple[str, ...],
        About(
            "Further name of this server that requests may have in Host.",
            unset="without a key, only this machine's own names; with a key, any",
            flag="--allowed-host",
            private=True,
        ),
    ] = ()
    models: Annotated[
        tuple[NamedModel, ...],
        About(
            "Model to serve under a name of its own; after commas, options of its engine, tool_parser and "
            "reasoning_parser. Without MODEL the first one is the default, and the engine's options on the command "
            "line apply to it",
            unset="MODEL alone",
            flag="--model",
            metavar="NAME=DIR[,OPTION=VALUE...]",
            narrowed=tuple[str, ...],
            private=True,
        ),
    ] = ()
    adapters: Annotated[
        tuple[NamedAdapter, ...],
        About(
            "Adapter (LoRA, DoRA) to serve beside the default model, under a name of its own",
            unset="none",
            flag="--adapter",
            metavar="NAME=DIR",
            narrowed=tuple[str, ...],
            private=True,
        ),
    ] = ()
    models_dir: Annotated[
        Path | None,
        About("Directory whose models and adapters may be loaded while the server runs.", unset="none", private=True),
    ] = None
    aliases: Annotated[
        tuple[str, ...], About("Another name for a model.", unset="none", flag="--alias", metavar="ALIAS=NAME")
    ] = ()
    served_model_name: Annotated[
        tuple[str, ...], About("Name that requests use; further ones are aliases", unset="the directory's")
    ] = ()
    data_dir: Annotated[
        Path | None, About("Directory of jobs, uploads and checkpoints.", unset="one for each model", private=True)
    ] = None
    database: Annotated[
        str | None,
        About(
            "PostgreSQL database in which several servers share jobs, active weights and API keys.",
            unset="an SQLite file in the data directory",
            metavar="URL",
            private=True,
        ),
    ] = field(default=None, repr=False)
    artifacts: Annotated[
        str | None,
        About(
            "Bucket, or directory in it, in which servers with one --database share the files of jobs, such as "
            "s3://BUCKET/PREFIX.",
            unset="the data directory",
            metavar="URL",
            private=True,
        ),
    ] = field(default=None, repr=False)
    train_on: Annotated[TrainOn, About("How fine-tune jobs use the serving device.")] = "refuse"
    train_device: Annotated[str | None, About("Device of fine-tune jobs.", unset="the serving device")] = None
    train_procs: Annotated[
        int, Ge(1), Le(1024), About("Processes of a fine-tune job; at most the job's option `accumulate`.")
    ] = 1
    keep_jobs: Annotated[
        int | None, Ge(1), About("Ended fine-tune jobs to keep; older ones are deleted with their files.", unset="all")
    ] = None
    report_to: Annotated[
        tuple[ReportTool, ...],
        About(
            "Fine-tune jobs also write metrics for tensorboard or wandb, which must be installed.",
            unset="none",
            metavar="TOOL",
            narrowed=tuple[str, ...],
        ),
    ] = ()
    grader_urls: Annotated[
        tuple[str, ...],
        About(
            "Address to which fine-tune jobs may send completions for grading (grpo), with all paths below it.",
            unset="none",
            flag="--grader-url",
            metavar="URL",
            private=True,
        ),
    ] = ()
    drain_seconds: Annotated[float, Ge(0), About("Seconds for requests to finish after SIGTERM.")] = 30.0
    heartbeat_seconds: Annotated[
        Seconds,
        About("Seconds without a heartbeat after which the engine is restarted; with `tensor_parallel`, 8 at most."),
    ] = 30.0
    step_seconds: Annotated[Seconds, About("Seconds of one step after which the engine is restarted.")] = 600.0
    load_seconds: Annotated[Seconds, About("Seconds for weights to load.")] = 1800.0
    transfer_seconds: Annotated[
        Seconds, About("Seconds for a trainer's process group to connect, and for each message of weights to arrive.")
    ] = 300.0
    request_seconds: Annotated[float | None, Gt(0), About("Seconds for a response to finish.", unset="no limit")] = None
    tool_parser: Annotated[
        ToolFormat, About("Format of the model's tool calls; auto: the format of its chat template.")
    ] = "auto"
    reasoning_parser: Annotated[
        ReasoningFormat, About("Format of the model's reasoning; auto: the format of its chat template.")
    ] = "auto"
    log_format: Annotated[LogFormat, About("Format of the log: lines of text, or one JSON object per line.")] = "plain"
    otlp_endpoint: Annotated[
        str | None,
        About(
            "OpenTelemetry collector for spans, by OTLP over HTTP, such as http://localhost:4318.",
            unset="OTEL_EXPORTER_OTLP_ENDPOINT",
            private=True,
        ),
    ] = field(default=None, repr=False)
    vllm_metrics: Annotated[bool, About("Also publish metrics under vllm:* names.")] = False
    metrics_without_key: Annotated[bool, About("Answer GET /metrics without a key, for scrapers that send none.")] = (
        False
    )
    metrics_per_layer: Annotated[
        bool, About("Also publish amax, headroom, clipped share and drift of every FP8 layer in /metrics.")
    ] = False
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        if isinstance(self.served_model_name, str):  # the Python API also accepts one name without a tuple
            object.__setattr__(self, "served_model_name", (self.served_model_name,))
        EngineOptions.__post_init__(self)
        if self.api_key is not None and not self.api_key.strip():
            raise RequestError("The API key is empty; give a key or omit the option.")
        if not self.requires_keys and not self.allow_unauthenticated and not is_loopback(self.host):
            raise MachineError(  # anyone who reaches the port could run jobs
                f"Listening on {self.host} lets other machines in, and no API key is set: "
                "give --api-key-file (or --api-key, --api-keys), listen on 127.0.0.1, or say --allow-unauthenticated."
            )
        if self.database is not None:
            check_database_url(self.database)
        if self.artifacts is not None and self.database is None:
            raise RequestError("--artifacts is for servers that share a database; give --database, too.")
        check_installed(self.report_to)
        _check_endpoint("--otlp-endpoint", self.otlp_endpoint)
        for url in self.grader_urls:
            _check_endpoint("--grader-url", url)
        _check_names(self)

    @property
    def requires_keys(self) -> bool:
        """Whether requests must have a key, even if the database has none yet."""
        is_open = self.database is None or self.allow_unauthenticated or is_loopback(self.host)
        return self.api_key is not None or self.api_keys is not None or not is_open

    @property
    def engine(self) -> EngineOptions:
        """The options of the engine process."""
        return EngineOptions(**{f.name: getattr(self, f.name) for f in fields(EngineOptions)})

    def on_device(self) -> "Settings":
        """Returns the settings with the devices that "auto" stands for. Raises RequestError if an option does not suit
        them."""
        from fp8serve.model.device import resolve_device  # here, so that `fp8serve --help` is fast

        settings = replace(self, device=with_device(self.engine, self.model).device)
        if self.train_device != AUTO:
            return settings
        return replace(settings, train_device=resolve_device(AUTO, self.model))

    @property
    def gpu_memory_beside_jobs(self) -> float | None:
        """The option gpu_memory with which an engine leaves room for fine-tune jobs or for an engine with their
        results. None if the option is set, or if this server accepts no jobs."""
        is_given = self.gpu_memory is not None
        return None if is_given or self.training_refused is not None else TRAINING_GPU_MEMORY_FRACTION

    @property
    def public(self) -> dict[str, Any]:
        """The options without secrets, paths and addresses."""
        return {o.name: getattr(self, o.name) for o in options_of(Settings) if not o.about.private}

    @property
    def model_name(self) -> str:
        """The name of the default model: the first `served_model_name`, else the directory's own."""
        return self.served_model_name[0] if self.served_model_name else self.model.resolve().name

    @property
    def named_aliases(self) -> dict[str, str]:
        """Maps each alias, and each further `served_model_name`, to the name of its model."""
        further = dict.fromkeys(self.served_model_name[1:], self.model_name)
        return further | dict(text.split("=", 1) for text in self.aliases)

    @property
    def output_format(self) -> OutputFormat:
        """The parsers of tool calls and reasoning; "auto" if the option was not set."""
        return OutputFormat(self.tool_parser, self.reasoning_parser)

    @property
    def training_device(self) -> str:
        """The device of fine-tune jobs."""
        return self.train_device or self.device

    @property
    def deadlines(self) -> Deadlines:
        return Deadlines(self.heartbeat_seconds, self.step_seconds, self.load_seconds)

    @property
    def trains_on_serving_device(self) -> bool:
        return self.training_device == self.device

    @property
    def training_refused(self) -> str | None:
        """Why this server refuses fine-tune jobs, or None if it accepts them."""
        if self.train_on != "refuse" or not self.trains_on_serving_device:
            return None
        return f"A fine-tune job would run on {self.device}, the serving device, and --train-on does not allow that."


def check_database_url(url: str) -> str:
    """Returns `url`. Raises RequestError unless it is PostgreSQL's. The message does not show it, because it may
    contain a password."""
    if not url.startswith(("postgresql://", "postgres://")):
        raise RequestError("--database must be the URL of a PostgreSQL database: postgresql://HOST/NAME.")
    return url


def _check_endpoint(option: str, endpoint: str | None) -> None:
    """Raises RequestError for an invalid address. The message does not show it, because it may contain a password."""
    if endpoint is not None and http_address(endpoint) is None:
        raise RequestError(f"{option} must be an address such as http://localhost:4318.")


def _check_names(settings: Settings) -> None:
    """Raises RequestError if a name occurs twice or an alias stands for an unknown name."""
    for name in settings.served_model_name[1:]:
        check_name(name)
    names = [settings.model_name, *settings.served_model_name[1:], *(model.name for model in settings.models)]
    for text in settings.aliases:
        alias, equals, name = text.partition("=")
        if not equals or name not in names:
            choices = ", ".join(names)
            raise RequestError(f"--alias must be ALIAS=NAME, with one of the names {choices}, not {shown(text)}.")
        check_name(alias)
        names.append(alias)
    names += [adapter.name for adapter in settings.adapters]
    if duplicate := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"{shown(duplicate)} is the name of two models or adapters; give one of them another name.")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address `host`. Names other than localhost count as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
