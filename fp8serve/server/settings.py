"""What a server is told when it starts: one frozen object, checked once, in one sentence per mistake.

The command line fills it; `create_app` and `run` read it; nothing here reads the environment. Sizes are bytes,
times are seconds. `ServerLimits` bounds everything that a request can multiply and is shown by `GET /info`.
"""

import ipaddress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le

from fp8serve.engine.options import EngineOptions
from fp8serve.errors import MachineError, RequestError, shown
from fp8serve.logs import LogFormat
from fp8serve.options import About, check, http_address, options_of
from fp8serve.server.answers.choice import AnswerFormat, ReasoningFormat, ToolFormat
from fp8serve.server.named_models import NamedAdapter, NamedModel, check_name
from fp8serve.train.reporting import ReportTool, check_installed

TrainOn = Literal["refuse", "share", "pause"]
Count = Annotated[int, Ge(1)]
Seconds = Annotated[float, Gt(0)]
KEY_VARIABLE = "FP8SERVE_API_KEY"


@dataclass(frozen=True)
class ServerLimits:
    """Bounds on what one request, or all of them together, may ask for."""

    body_bytes: Annotated[Count, About("Bytes of one request's body.")] = 8 << 20
    held_bytes: Annotated[Count, About("Bytes of all request bodies together.")] = 256 << 20
    header_bytes: Annotated[Count, About("Bytes of one request's headers.")] = 64 << 10
    upload_bytes: Annotated[Count, About("Bytes of an uploaded file, also unpacked.")] = 1 << 30
    body_seconds: Annotated[Seconds, About("Seconds for a body to arrive.")] = 30.0
    header_seconds: Annotated[Seconds, About("Seconds for the headers to arrive.")] = 10.0
    send_seconds: Annotated[Seconds, About("Seconds for a client to take a piece of its answer.")] = 60.0
    queue: Annotated[Count, About("Answers that wait for a place among those that run.")] = 256
    queue_tokens: Annotated[Count, About("Tokens of the prompts that wait.")] = 1 << 20
    n: Annotated[Count, About("Answers to one prompt.")] = 128
    prompts: Annotated[Count, About("Prompts of one request.")] = 64
    prompt_logprobs: Annotated[
        Count, About("Log-probabilities of the tokens of one request's prompts and of their alternatives.")
    ] = 1 << 18
    texts: Annotated[Count, About("Texts of one request for vectors or scores.")] = 2048
    chat_messages: Annotated[Count, About("Messages of one conversation.")] = 1024
    connections: Annotated[Count, About("Connections that are open, at most what the limit of open files allows.")] = (
        8192
    )
    streams: Annotated[Count, About("Streams that are open.")] = 512
    keep_alive_seconds: Annotated[Seconds, About("Seconds between two signs of life in a stream.")] = 15.0
    jobs_queued: Annotated[Count, About("Fine-tune jobs that wait.")] = 32
    row_bytes: Annotated[Count, About("Bytes of one row of training data.")] = 1 << 20
    rows: Annotated[Count, About("Rows of a file of training data.")] = 1_000_000
    reading_seconds: Annotated[Seconds, About("Processor time to check, render and tokenize one request.")] = 30.0
    reading_memory: Annotated[Count, About("Bytes of memory for the same.")] = 1 << 30
    reading_bytes: Annotated[Count, About("Bytes of requests that wait for that.")] = 64 << 20
    template_seconds: Annotated[Seconds, About("Seconds of reading_seconds to render a chat template.")] = 2.0
    validation_seconds: Annotated[Seconds, About("Processor time to check the rows of a fine-tune.")] = 600.0
    validation_memory: Annotated[Count, About("Bytes of memory for the same, and for a job's data.")] = 8 << 30

    def __post_init__(self) -> None:
        check(self, RequestError)


@dataclass(frozen=True)
class Deadlines:
    """Seconds: for a heartbeat to come, for a step to end, for weights to load and give a first token."""

    heartbeat: float
    step: float
    load: float


@dataclass(frozen=True, kw_only=True)
class Settings(EngineOptions):
    """One server: which model, and which beside it, how its engine runs, where it listens, who may use it.

    `train_on` decides what a fine-tune job may do to the device that serves: "refuse" it, "share" the device, or
    "pause" serving while the job runs; a `train_device` other than `device` needs no such choice. For
    `allowed_hosts` see http/access_control.py. An engine that breaks a deadline is started again; weights that are
    not ready in time are given up, and so is an answer. Raises RequestError or MachineError on an impossible value.
    """

    model: Path
    host: Annotated[str, About("Address to listen on; others than this machine's own need a key.", private=True)] = (
        "127.0.0.1"
    )
    port: Annotated[int, Ge(0), Le(65535), About("Port; 0 takes a free one.", private=True)] = 8000
    api_key: Annotated[
        str | None,
        About(
            "Key that every request but health must carry. Other programs of this machine can read it here; "
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
            "Further name by which requests may ask for this server.",
            unset="this machine's own names, where there is no key",
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
        tuple[str, ...],
        About(
            "Name that requests use; further ones are aliases",
            unset="the directory's",
        ),
    ] = ()
    data_dir: Annotated[
        Path | None, About("Where jobs, uploads and checkpoints are kept.", unset="one for each model", private=True)
    ] = None
    train_on: Annotated[TrainOn, About("What a fine-tune may do to the device that serves.")] = "refuse"
    train_device: Annotated[str | None, About("Device of fine-tune jobs.", unset="the one that serves")] = None
    train_procs: Annotated[
        int, Ge(1), Le(1024), About("Processes of a fine-tune job; at most as many as its accumulate.")
    ] = 1
    keep_jobs: Annotated[
        int | None,
        Ge(1),
        About("Fine-tune jobs to keep that have ended; older ones are deleted with their files.", unset="all"),
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
            "Address to which fine-tune jobs may send answers for grading (grpo), with all below it.",
            unset="none",
            flag="--grader-url",
            metavar="URL",
            private=True,
        ),
    ] = ()
    drain_seconds: Annotated[float, Ge(0), About("How long requests may finish after SIGTERM.")] = 30.0
    heartbeat_seconds: Annotated[Seconds, About("Silence after which the engine is started again.")] = 30.0
    step_seconds: Annotated[Seconds, About("Time of one step after which the engine is started again.")] = 600.0
    load_seconds: Annotated[Seconds, About("How long weights may take to load.")] = 1800.0
    request_seconds: Annotated[float | None, Gt(0), About("How long an answer may take.", unset="no limit")] = None
    tool_parser: Annotated[ToolFormat, About("How the model writes tool calls; auto: as its template does.")] = "auto"
    reasoning_parser: Annotated[ReasoningFormat, About("How the model writes what it thinks; likewise.")] = "auto"
    log_format: Annotated[LogFormat, About("How the log is written: lines of text, or a JSON object a line.")] = "plain"
    otlp_endpoint: Annotated[
        str | None,
        About(
            "OpenTelemetry collector that gets spans, by OTLP over HTTP, such as http://localhost:4318.",
            unset="OTEL_EXPORTER_OTLP_ENDPOINT",
            private=True,
        ),
    ] = field(default=None, repr=False)
    vllm_metrics: Annotated[bool, About("Also publish metrics under vllm:* names.")] = False
    metrics_per_layer: Annotated[
        bool, About("Also publish amax, headroom, cut-off share and drift of every FP8 layer in /metrics.")
    ] = False
    limits: ServerLimits = field(default_factory=ServerLimits)

    def __post_init__(self) -> None:
        if isinstance(self.served_model_name, str):  # in Python, one name needs no tuple
            object.__setattr__(self, "served_model_name", (self.served_model_name,))
        EngineOptions.__post_init__(self)
        if self.api_key is not None and not self.api_key.strip():
            raise RequestError("The API key is empty; give a key or leave the option out.")
        _check_exposure(self)
        check_installed(self.report_to)
        _check_endpoint("--otlp-endpoint", self.otlp_endpoint)
        for url in self.grader_urls:
            _check_endpoint("--grader-url", url)
        _check_names(self)

    @property
    def asks_for_keys(self) -> bool:
        """Whether requests must carry a key."""
        return self.api_key is not None or self.api_keys is not None

    @property
    def engine(self) -> EngineOptions:
        """What the engine's process is told."""
        return EngineOptions(**{f.name: getattr(self, f.name) for f in fields(EngineOptions)})

    @property
    def public(self) -> dict[str, Any]:
        """The options in force, without secrets and places."""
        return {o.name: getattr(self, o.name) for o in options_of(Settings) if not o.about.private}

    @property
    def model_name(self) -> str:
        """The name of the default model: the first `served_model_name`, else the directory's own."""
        return self.served_model_name[0] if self.served_model_name else self.model.resolve().name

    @property
    def named_aliases(self) -> dict[str, str]:
        """Of each alias, and each further `served_model_name`, the name that it stands for."""
        further = dict.fromkeys(self.served_model_name[1:], self.model_name)
        return further | dict(text.split("=", 1) for text in self.aliases)

    @property
    def answers(self) -> AnswerFormat:
        """How answers are read, as far as it is told."""
        return AnswerFormat(self.tool_parser, self.reasoning_parser)

    @property
    def training_device(self) -> str:
        """Where a fine-tune job runs."""
        return self.train_device or self.device

    @property
    def deadlines(self) -> Deadlines:
        return Deadlines(self.heartbeat_seconds, self.step_seconds, self.load_seconds)

    @property
    def trains_on_serving_device(self) -> bool:
        return self.training_device == self.device

    @property
    def training_refused(self) -> str | None:
        """Why this server runs no fine-tune jobs, without what to do; None if it runs them."""
        if self.train_on != "refuse" or not self.trains_on_serving_device:
            return None
        return (
            f"A fine-tune job would run on {self.device}, the device that serves, and this server was not told how to "
            "share it."
        )


def _check_exposure(settings: Settings) -> None:
    """Whoever can reach the port can run jobs on this machine, so an open port needs a key or an explicit word."""
    if not settings.asks_for_keys and not settings.allow_unauthenticated and not is_loopback(settings.host):
        raise MachineError(
            f"Listening on {settings.host} lets other machines in, and no API key is set: "
            "give --api-key-file (or --api-key, --api-keys), listen on 127.0.0.1, or say --allow-unauthenticated."
        )


def _check_endpoint(option: str, endpoint: str | None) -> None:
    """What is wrong with it is not shown: it may hold a password."""
    if endpoint is not None and http_address(endpoint) is None:
        raise RequestError(f"{option} must be an address such as http://localhost:4318.")


def _check_names(settings: Settings) -> None:
    """Every name once, and aliases for names that there are."""
    for name in settings.served_model_name[1:]:
        check_name(name)
    names = [settings.model_name, *settings.served_model_name[1:], *(model.name for model in settings.models)]
    for text in settings.aliases:
        alias, equals, name = text.partition("=")
        if not equals or name not in names:
            known = ", ".join(names)
            raise RequestError(f"--alias wants ALIAS=NAME, the name one of {known}, and not {shown(text)}.")
        check_name(alias)
        names.append(alias)
    names += [adapter.name for adapter in settings.adapters]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"{shown(twice)} is the name of two models or adapters; give one of them another name.")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`. A name other than localhost counts as reachable."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
