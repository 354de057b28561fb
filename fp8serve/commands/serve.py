"""`fp8serve serve`: the HTTP server, in the foreground until a signal ends it."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from fp8serve.errors import MachineError, RequestError
from fp8serve.fp8.recipe import RecipeName

KEY_VARIABLE = "FP8SERVE_API_KEY"
RecipeChoice = Literal["stored", RecipeName]


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face-format directory, or a name on the hub.")],
    recipe: Annotated[
        RecipeChoice, typer.Option(help="'stored': the scales in the directory; the others are made on the fly.")
    ] = "stored",
    scales: Annotated[
        Path | None, typer.Option(help="scales.safetensors to use instead of the directory's own.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this machine's own need a key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    fd: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Listen on this open socket, inherited from the parent process, instead of --host and --port.",
            show_default=False,
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            help="Key that every request but health must carry. Other programs of this machine can read it here; "
            f"{KEY_VARIABLE} in the environment and --api-key-file hide it.",
            show_default=False,
        ),
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File that holds the key, and nothing else.")] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Further name by which requests may ask for this server; may be given several times.",
            show_default="this machine's own names, where there is no key",
        ),
    ] = None,
    allow_unauthenticated: Annotated[
        bool, typer.Option("--allow-unauthenticated", help="Listen beyond this machine without a key.")
    ] = False,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name that requests use.", show_default="the directory's")
    ] = None,
    kv_cache_dtype: Annotated[Literal["bf16", "fp8"], typer.Option(help="Element type of the KV cache.")] = "bf16",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences that run at the same time.")] = 16,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Tokens of prompt and answer.", show_default="the model's")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    gpu_memory: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Share of a GPU's memory that may be used.", show_default="0.9"),
    ] = None,
    cuda_graphs: Annotated[
        bool | None,
        typer.Option("--cuda-graphs/--no-cuda-graphs", help="Replay decoding steps.", show_default="on a GPU"),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(help="Where jobs, uploads and checkpoints are kept.", show_default="one for each model"),
    ] = None,
    train_on: Annotated[
        Literal["refuse", "share", "pause"], typer.Option(help="What a fine-tune may do to the device that serves.")
    ] = "refuse",
    train_device: Annotated[
        str | None, typer.Option(help="Device of fine-tune jobs.", show_default="the one that serves")
    ] = None,
    drain_seconds: Annotated[float, typer.Option(min=0, help="How long requests may finish after SIGTERM.")] = 30.0,
    heartbeat_seconds: Annotated[
        float, typer.Option(min=0, help="Silence after which the engine is started again.")
    ] = 30.0,
    step_seconds: Annotated[
        float, typer.Option(min=0, help="Time of one step after which the engine is started again.")
    ] = 600.0,
    load_seconds: Annotated[float, typer.Option(min=0, help="How long weights may take to load.")] = 1800.0,
    request_seconds: Annotated[
        float | None, typer.Option(min=0, help="How long an answer may take.", show_default="no limit")
    ] = None,
    vllm_metrics: Annotated[
        bool, typer.Option("--vllm-metrics", help="Also publish metrics under vllm:* names.")
    ] = False,
) -> None:
    """Serve MODEL over HTTP until a signal ends it.

    Routes: /generate, the OpenAI ones, /finetune, /health, /metrics, /docs, and a console at /.

    \b
    Examples:
      fp8serve serve ./llama-fp8
      fp8serve serve ./llama-fp8 --host 0.0.0.0 --api-key-file key.txt
      fp8serve serve ./llama-fp8 --train-on share
      fp8serve serve ./llama --recipe current --port 8080
    """
    from fp8serve.hub import find_model

    secret = find_key(api_key, api_key_file)
    directory = find_model(model)
    from fp8serve.server.launch import adopt, run
    from fp8serve.server.settings import Settings

    listener = None if fd is None else adopt(fd)
    if listener is not None:
        host, port = listener.getsockname()[:2]
    settings = Settings(
        model=directory,
        recipe=recipe,
        scales=scales,
        host=host,
        port=port,
        api_key=secret,
        allowed_hosts=tuple(allowed_host or ()),
        allow_unauthenticated=allow_unauthenticated,
        served_model_name=served_model_name,
        device=device,
        gpu_memory=gpu_memory,
        cuda_graphs=cuda_graphs,
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        data_dir=data_dir,
        train_on=train_on,
        train_device=train_device,
        drain_seconds=drain_seconds,
        heartbeat_seconds=heartbeat_seconds,
        step_seconds=step_seconds,
        load_seconds=load_seconds,
        request_seconds=request_seconds,
        vllm_metrics=vllm_metrics,
    )
    run(settings, listener=listener)


def find_key(key: str | None, file: Path | None) -> str | None:
    """The key of the option, of the file, or of the environment, from which it is removed: the processes that this one
    starts need no secret. Raises RequestError or MachineError.
    """
    inherited = os.environ.pop(KEY_VARIABLE, None)
    if key is not None and file is not None:
        raise RequestError("Give --api-key or --api-key-file, not both.")
    if file is None:
        return inherited if key is None else key
    try:
        lines = file.read_text(encoding="utf-8").strip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise MachineError(f"The key file {file} cannot be read: {error}.") from None
    if len(lines) != 1:
        raise MachineError(f"The key file {file} must hold one line, the key, and has {len(lines)}.")
    return lines[0]
