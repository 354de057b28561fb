"""Models are written once per session; a test that changes one copies it first."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.model.oracle import make_model, write_tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`model_dir(kind)`: a directory that transformers wrote, with a tokenizer. Read only."""
    folders: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp(kind)
            make_model(kind, folders[kind])
            write_tokenizer(folders[kind])
        return folders[kind]

    return get


@pytest.fixture
def llama(model_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    """A private Llama directory that a test may break."""
    return Path(shutil.copytree(model_dir("llama"), tmp_path / "llama"))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
