"""Which models there are: names, other names for them, and the one that answers where a request names none.

Names come from tables here; nothing a client sends is ever joined to a path.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fp8serve.engine.request import Task
from fp8serve.server.faults import Code, Fault
from fp8serve.server.serving.served import Served
from fp8serve.server.serving.served_model import ServedModel

PLACEHOLDERS = frozenset({"dummy", "tgi"})
"""Names by which official clients say "the model you serve": huggingface_hub's InferenceClient, given an address, and
what text-generation-inference tells users of OpenAI's client to send."""


class Registry:
    """Models by their names. The default is there as long as the server is; it stands first."""

    def __init__(self, default: ServedModel) -> None:
        self.default = default
        self.models = {default.name: default}
        self.aliases: dict[str, str] = {}  # to the name of a model

    def names(self) -> list[str]:
        """By which requests may ask now, those of the default first, aliases last."""
        own = (name for model in self.models.values() for name in model.names())
        return list(dict.fromkeys([*own, *(alias for alias, name in self.aliases.items() if name in self.models)]))

    def named(self, name: str) -> ServedModel | None:
        """The model that a name, an alias, or the id of the weights behind a name stands for."""
        found = self.models.get(name) or self.models.get(self.aliases.get(name, ""))
        return found or next((model for model in self.models.values() if name in model.names()), None)

    def find(self, name: str, param: str = "name") -> ServedModel:
        """As `named`. Fault 404 where there is none."""
        if (found := self.named(name)) is not None:
            return found
        hint = (
            f"This server answers to {', '.join(self.names())}; a fine-tuned model must be activated or loaded first."
        )
        raise Fault(Code.MODEL_NOT_FOUND, "There is no model of that name here.", param=param, hint=hint)

    def resolve(self, model: str | None, tasks: Sequence[Task] = ()) -> Served:
        """The weights a request for `model` gets. Fault 404 for an unknown name, 503 while there is no engine.

        Where none is named it is the default, or the first model for one of `tasks` if the default is for another.
        """
        found = self._for(tasks) if model is None else self.named(model)
        if found is None and (model in PLACEHOLDERS or self.default.state == "loading"):
            found = self._for(tasks)  # the default may have other weights when it is loaded, and their name
        return (found or self.find(str(model), "model")).resolve()

    def _for(self, tasks: Sequence[Task]) -> ServedModel:
        fitting = (m for m in self.models.values() if m.current is not None and m.current.engine.limits.task in tasks)
        return next(fitting, self.default) if self.default.current is not None else self.default

    def serving(self, key: str) -> bool:
        """Whether a model serves the weights of this source."""
        return any(m.current is not None and m.current.source.key == key for m in self.models.values())

    def count(self, of: Callable[[ServedModel], int]) -> int:
        """The sum over all models."""
        return sum(map(of, self.models.values()))

    def stats(self) -> Mapping[str, Mapping[str, Any]]:
        """What each engine said last about itself."""
        return {name: model.stats for name, model in self.models.items()}
