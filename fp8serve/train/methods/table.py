"""Returns the reader and the method that a job's configuration names."""

from collections.abc import Callable
from typing import Any

from fp8serve.train.config import TrainConfig
from fp8serve.train.methods.dpo.data import DpoReader
from fp8serve.train.methods.grpo.data import GrpoReader
from fp8serve.train.methods.interface import Method, Reader
from fp8serve.train.methods.options import MethodName
from fp8serve.train.methods.supervised import Sft, SftReader


def reader_of(config: TrainConfig) -> Reader[Any, Any]:
    """Returns the reader of the job's data. It imports no torch."""
    readers: dict[MethodName, Callable[[], Reader[Any, Any]]] = {
        "sft": SftReader, "dpo": DpoReader, "grpo": lambda: GrpoReader(config.max_completion_tokens)
    }  # fmt: skip
    return readers[config.method]()


def method_of(config: TrainConfig) -> Method[Any]:
    """Returns the job's training method. Only `grpo` imports the engine."""
    match config.method:
        case "sft":
            return Sft(config)
        case "dpo":
            from fp8serve.train.methods.dpo.method import Dpo

            return Dpo(config)
        case "grpo":
            from fp8serve.train.methods.grpo.method import Grpo

            return Grpo(config)
