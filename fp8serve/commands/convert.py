"""Convert a model into another format, without calibrating it again.

A GGUF file is converted to a Hugging Face directory with BF16 weights, tokenizer and chat template. The other commands
accept GGUF files, too, and convert them once into the hub's cache. MODEL may also be smollm2 or a name on the hub.
--format writes a quantized directory in the format of another project, with the same values; a conversion that needs
another rounding of weights is refused. --format gguf writes a file for llama.cpp from any directory of Llama, Mistral,
Qwen2, Qwen3 and Qwen3-MoE.

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
    format: Annotated[Target | None, typer.Option(help="Format of the result.")] = None,
    weight_type: Annotated[
        GgufType | None, typer.Option("--type", help="Type of the matrices of a GGUF file.", show_default="BF16")
    ] = None,
    json: AsJson = False,
) -> None:
    from fp8serve.terminal import format_bytes

    if weight_type is not None and format != "gguf":
        raise RequestError("--type needs --format gguf; give both, or leave --type out.")
    source = _source(model, format)
    if source.is_file():
        contents = _convert_gguf(source, out, format)
    else:
        contents = _convert_directory(source, out, format, weight_type)
    size_bytes = sum(file.stat().st_size for file in ([out] if out.is_file() else out.iterdir()))
    if json:
        print_json({"out": str(out), "bytes": size_bytes})
    else:
        print(f"Wrote {out}: {format_bytes(size_bytes)} {contents}.")


def _source(name: str, format: Target | None) -> Path:
    from fp8serve.hub import find_model
    from fp8serve.model.gguf import smollm2_file

    path = Path(name).expanduser()
    if path.exists():
        return path
    return smollm2_file() if name == "smollm2" and format is None else find_model(name)


def _convert_gguf(model: Path, out: Path, format: Target | None) -> str:
    """Writes the directory `out`. Returns a description of its weights."""
    from fp8serve.model.gguf import convert
    from fp8serve.model.gguf.reader import is_gguf

    if format is not None and is_gguf(model):
        raise RequestError("A GGUF file is converted to BF16; leave --format out, and calibrate the result.")
    convert(model, out)
    return "in BF16, with the tokenizer"


def _convert_directory(model: Path, out: Path, format: Target | None, weight_type: GgufType | None) -> str:
    if format is None:
        raise RequestError(f"Give the format of the result: --format {' or '.join(get_args(Target))}.")
    if format == "gguf":
        from fp8serve.model.gguf.writer import write_gguf

        write_gguf(model, out, weight_type or "BF16")
        return f"in {weight_type or 'BF16'} as GGUF, with the tokenizer"
    from fp8serve.model.checkpoint import open_checkpoint
    from fp8serve.model.format_conversion import convert_format
    from fp8serve.model.stored_checkpoint import dropped_inputs_notes
    from fp8serve.terminal import remark

    elements = convert_format(model, out, format).name
    for note in dropped_inputs_notes(open_checkpoint(model)):
        remark(f"{note} The result has no scales of inputs.")
    return f"in {elements}, as {format}, with the same {elements} values"
