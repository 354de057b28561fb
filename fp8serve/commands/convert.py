"""Convert a GGUF file into a Hugging Face-format directory: weights in BF16, tokenizer and chat template.

The other commands take a GGUF file themselves; they convert it once, into the hub's cache.

\b
Examples:
  fp8serve convert ./llama-Q4_K_M.gguf --out ./llama
  fp8serve calibrate ./llama-Q4_K_M.gguf --out ./llama-fp8
"""

from pathlib import Path
from typing import Annotated

import typer

from fp8serve.terminal import AsJson, print_json


def command(
    model: Annotated[Path, typer.Argument(metavar="MODEL.gguf", help="GGUF file of llama.cpp.")],
    out: Annotated[Path, typer.Option(help="Directory to write; it must not exist, or be empty.")],
    json: AsJson = False,
) -> None:
    from fp8serve.model.gguf.conversion import convert
    from fp8serve.terminal import size

    convert(model, out)
    written = sum(file.stat().st_size for file in out.iterdir())
    if json:
        print_json({"out": str(out), "bytes": written})
    else:
        print(f"Wrote {out}: {size(written)} in BF16, with the tokenizer.")
