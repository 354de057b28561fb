"""A GGUF file becomes a Hugging Face directory in BF16: whole or not at all, one tensor in memory at a time."""

from pathlib import Path

from fp8serve.model.export import write_hf_directory
from fp8serve.model.gguf.config import ROPE_FACTORS, hf_config
from fp8serve.model.gguf.families import layout_of
from fp8serve.model.gguf.reader import GgufFile
from fp8serve.model.gguf.tensors import Weights
from fp8serve.model.gguf.tokenizer import tokenizer_files
from fp8serve.model.storage.files import check_absent


def convert(path: Path | str, out: Path | str) -> None:
    """Write the model in the GGUF file `path` to the directory `out`: weights in BF16, tokenizer, chat template.

    ModelError: `out` is taken; the file is damaged, or holds an architecture, a type or a tokenizer that is not read.
    """
    out = Path(out)
    check_absent(out)
    file = GgufFile(Path(path))
    config = hf_config(file)
    layout = layout_of(file)
    weights = Weights(file, layout, config, (ROPE_FACTORS, *layout.tensors))
    write_hf_directory(out, config, weights, extra_files=tokenizer_files(file))
