"""Which models there are: names, other names for them, and the one that answers where a request names none.

Names come from tables here; nothing a client sends is ever joined to a path.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fp8serve.engine.request import Task
from fp8serve.errors import suggestion
from fp8serve.server.faults import Code, Fault
from fp8serve.server.serving.adapters import ServedAdapter
from fp8serve.server.serving.served import Served
from fp8serve.server.serving.served_model import ServedModel

COUNTED = ("running", "waiting")
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
        """By which requests may ask now, those of the default first, then adapters, aliases last."""
        own = (name for model in self.models.values() for name in model.names())
        adapters = (name for model in self.models.values() for name in model.adapters)
        return list(
            dict.fromkeys([*own, *adapters, *(alias for alias, name in self.aliases.items() if name in self.models)])
        )

    def named(self, name: str) -> ServedModel | None:
        """The model that a name, an alias, or the id of the weights behind a name stands for."""
        model = self.models.get(name) or self.models.get(self.aliases.get(name, ""))
        return model or next((model for model in self.models.values() if name in model.names()), None)

    def adapter(self, name: str) -> tuple[ServedModel, ServedAdapter] | None:
        """The adapter of that name, behind the model that has it."""
        candidates = ((model, model.adapters.get(name)) for model in self.models.values())
        return next(((model, adapter) for model, adapter in candidates if adapter is not None), None)

    def find_adapter(self, name: str) -> tuple[ServedModel, ServedAdapter]:
        """As `adapter`. Fault 404 where there is none."""
        if (pair := self.adapter(name)) is not None:
            return pair
        known = [adapter for model in self.models.values() for adapter in model.adapters]
        message = f"There is no adapter of that name here.{suggestion(name, known)}"
        hint = f"Loaded are: {', '.join(known) or 'none'}."
        raise Fault(Code.MODEL_NOT_FOUND, message, param="lora_name", hint=hint)

    def is_taken(self, name: str) -> bool:
        """Whether something has that name."""
        return self.named(name) is not None or self.adapter(name) is not None

    def own_name(self, name: str) -> str:
        """Of the model or adapter that `name` stands for. Fault 404 where there is none."""
        return name if self.adapter(name) is not None else self.find(name, "model").name

    def adapters_of(self, served: Served) -> list[ServedAdapter]:
        """The adapters of the model that serves these weights."""
        models = (model for model in self.models.values() if model.current is not None)
        owners = (m for m in models if m.current is not None and m.current.engine is served.engine)
        return [adapter for model in owners for adapter in model.adapters.values()]

    def find(self, name: str, param: str = "name") -> ServedModel:
        """As `named`. Fault 404 where there is none."""
        if (model := self.named(name)) is not None:
            return model
        known = self.names()
        message = f"There is no model of that name here.{suggestion(name, known)}"
        hint = f"This server answers to {', '.join(known)}; a fine-tuned model must be activated or loaded first."
        raise Fault(Code.MODEL_NOT_FOUND, message, param=param, hint=hint)

    def resolve(self, model: str | None, tasks: Sequence[Task] = ()) -> Served:
        """The weights a request for `model` gets. Fault 404 for an unknown name, 503 while there is no engine.

        Where none is named it is the default, or the first model for one of `tasks` if the default is for another.
        """
        if model is not None and (pair := self.adapter(model)) is not None:
            base, adapter = pair
            return adapter.served_with(base.resolve())
        chosen = self._for(tasks) if model is None else self.named(model)
        if chosen is None and (model in PLACEHOLDERS or self.default.state == "loading"):
            chosen = self._for(tasks)  # the default may have other weights when it is loaded, and their name
        return (chosen or self.find(str(model), "model")).resolve()

    def _for(self, tasks: Sequence[Task]) -> ServedModel:
        fitting = (m for m in self.models.values() if m.current is not None and m.current.engine.limits.task in tasks)
        return next(fitting, self.default) if self.default.current is not None else self.default

    def sources(self) -> set[str]:
        """The keys of all weights that serve, adapters' included."""
        models = list(self.models.values())
        keys = {model.current.source.key for model in models if model.current is not None}
        return keys | {adapter.source.key for model in models for adapter in list(model.adapters.values())}

    def serving(self, key: str) -> bool:
        """Whether a model serves the weights of this source."""
        return key in self.sources()

    def count(self, of: Callable[[ServedModel], int]) -> int:
        """The sum over all models."""
        return sum(map(of, self.models.values()))

    def stats(self) -> Mapping[str, Mapping[str, Any]]:
        """What each engine said last about itself; sequences with an adapter are counted under its name alone."""
        totals: dict[str, Mapping[str, Any]] = {}
        for name, model in self.models.items():
            stats, adapters = model.stats, model.adapter_stats().values()
            own = {key: stats[key] - sum(counts[key] for counts in adapters) for key in COUNTED if key in stats}
            totals[name] = stats | own
        return totals

    def adapter_stats(self) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
        """By model and adapter, how many sequences run and wait."""
        return {name: model.adapter_stats() for name, model in self.models.items()}
