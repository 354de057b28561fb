"""One tiny model for all tests of the engine."""

from pathlib import Path

import pytest

from .tiny import write_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))
