"""Convert a model into another format, without calibrating it again.

A GGUF file becomes a Hugging Face-format directory with weights in BF16, tokenizer and chat template; the other
commands take a GGUF file themselves and convert it once, into the hub's cache. MODEL may also be smollm2 or a name on
the hub, as in the other commands. An FP8 directory is written in another project's format (--format), with the same FP8
values; a conversion that would have to round weights again is refused. --format gguf writes a file for llama.cpp from
any directory of Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE.

\b
Examples:
  fp8serve convert ./llama-Q4_K_M.gguf --out ./llama
  fp8serve convert smollm2 --out ./smollm2
  fp8serve convert ./llama-fp8 --out ./llama-modelopt --format modelopt
  fp8serve convert ./llama-tuned --out ./llama.gguf --format gguf --type Q8_0
"""

from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from fp8serve.errors import RequestError
from fp8serve.terminal import AsJson, Model, print_json

Target = Literal["compressed-tensors", "fp8", "modelopt", "gguf"]
GgufType = Literal["BF16", "F16", "Q8_0"]


def command(
    model: Model,
    out: Annotated[Path, typer.Option(help="Directory to write, or file for gguf; it must not exist.")],
    format: Annotated[Target | None, typer.Option(help="Format to write a directory in.")] = None,
    weight_type: Annotated[
        GgufType | None, typer.Option("--type", help="Type of a GGUF's matrices; BF16 unless it is given.")
    ] = None,
    json: AsJson = False,
) -> None:
    from fp8serve.terminal import size

    if weight_type is not None and format != "gguf":
        raise RequestError("--type is for GGUF files; give --format gguf, or leave it out.")
    source = _source(model, format)
    what = _from_gguf(source, out, format) if source.is_file() else _from_directory(source, out, format, weight_type)
    written = sum(file.stat().st_size for file in ([out] if out.is_file() else out.iterdir()))
    if json:
        print_json({"out": str(out), "bytes": written})
    else:
        print(f"Wrote {out}: {size(written)} {what}.")


def _source(name: str, format: Target | None) -> Path:
    """A directory, or a file that is converted into a place other than the cache."""
    from fp8serve.hub import find_model
    from fp8serve.model.gguf import smollm2_file

    path = Path(name).expanduser()
    if path.exists():
        return path
    return smollm2_file() if name == "smollm2" and format is None else find_model(name)


def _from_gguf(model: Path, out: Path, format: Target | None) -> str:
    """A sentence about what was written."""
    from fp8serve.model.gguf import convert
    from fp8serve.model.gguf.reader import is_gguf

    if format is not None and is_gguf(model):
        raise RequestError("A GGUF file becomes weights in BF16; leave out --format, and calibrate what is written.")
    convert(model, out)
    return "in BF16, with the tokenizer"


def _from_directory(model: Path, out: Path, format: Target | None, weight_type: GgufType | None) -> str:
    if format is None:
        raise RequestError(f"Name the format to write {model} in: --format {' or '.join(get_args(Target))}.")
    if format == "gguf":
        from fp8serve.model.gguf.writing import write_gguf

        write_gguf(model, out, weight_type or "BF16")
        return f"in {weight_type or 'BF16'} as GGUF, with the tokenizer"
    from fp8serve.model.rewriting import rewrite

    rewrite(model, out, format)
    return f"in FP8, as {format}, with the same FP8 numbers"
