"""Packages that only some options of a fine-tune need. No torch here, so that a server can refuse before it starts."""

from importlib.util import find_spec
from typing import TYPE_CHECKING

from fp8serve.errors import MachineError

if TYPE_CHECKING:
    from fp8serve.train.config import TrainConfig


def require_package(name: str, needed: str, option: str) -> None:
    """MachineError: the package is not installed. needed: the beginning of the sentence, which names it."""
    if find_spec(name) is None:
        raise MachineError(f"{needed}, which is not installed: pip install 'fp8serve[{name}]', or leave {option} out.")


def check_states(config: "TrainConfig") -> None:
    """MachineError: the optimizer's states need a package that is not installed."""
    if config.optimizer_states == "8bit":
        require_package("torchao", "8-bit optimizer states need torchao", "optimizer_states")
