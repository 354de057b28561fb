"""The models of one server: their names and aliases, and the default model for requests that name none.

Names are looked up in tables; no text of a client is ever joined to a path.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fp8serve.engine.request import Task
from fp8serve.errors import suggestion
from fp8serve.server.faults import Code, Fault
from fp8serve.server.serving.served_model import ServedModel
from fp8serve.server.serving.served_weights import ServedAdapter, ServedWeights

SEQUENCE_COUNTS = ("running", "waiting")
PLACEHOLDER = "dummy"
"""Stands for the default model: huggingface_hub's InferenceClient sends this name if it has only an address."""


class Registry:
    """Models by name. The default model comes first and is served as long as the server runs."""

    def __init__(self, default: ServedModel) -> None:
        self.default = default
        self.models = {default.name: default}
        self.aliases: dict[str, str] = {}  # alias -> name of a model

    def names(self) -> list[str]:
        """Returns all names that requests may use: models, the default first, then adapters, then aliases."""
        models = (name for model in self.models.values() for name in model.names())
        adapters = (name for model in self.models.values() for name in model.adapters)
        aliases = (alias for alias, name in self.aliases.items() if name in self.models)
        return list(dict.fromkeys([*models, *adapters, *aliases]))

    def get(self, name: str) -> ServedModel | None:
        """Returns the model with this name or alias, or whose weights have this id; None if there is none."""
        model = self.models.get(name) or self.models.get(self.aliases.get(name, ""))
        return model or next((model for model in self.models.values() if name in model.names()), None)

    def get_adapter(self, name: str) -> tuple[ServedModel, ServedAdapter] | None:
        """Returns the adapter of this name with its model, or None if there is none."""
        candidates = ((model, model.adapters.get(name)) for model in self.models.values())
        return next(((model, adapter) for model, adapter in candidates if adapter is not None), None)

    def require_adapter(self, name: str) -> tuple[ServedModel, ServedAdapter]:
        """Returns the adapter of this name with its model. Raises Fault 404 if there is none."""
        if (pair := self.get_adapter(name)) is not None:
            return pair
        names = [adapter for model in self.models.values() for adapter in model.adapters]
        message = f"This server has no adapter of that name.{suggestion(name, names)}"
        hint = f"Loaded adapters: {', '.join(names) or 'none'}."
        raise Fault(Code.MODEL_NOT_FOUND, message, param="lora_name", hint=hint)

    def is_taken(self, name: str) -> bool:
        """Whether a model, an alias or an adapter has this name."""
        return self.get(name) is not None or self.get_adapter(name) is not None

    def canonical_name(self, name: str | None) -> str:
        """Returns the name of the adapter or model that `name` stands for. Raises Fault 404 if there is none."""
        return name if name is not None and self.get_adapter(name) is not None else self.require(name, "model").name

    def adapters_of(self, served: ServedWeights) -> list[ServedAdapter]:
        """Returns the adapters of the model that serves these weights."""
        models = (m for m in self.models.values() if m.current is not None and m.current.engine is served.engine)
        return [adapter for model in models for adapter in model.adapters.values()]

    def require(self, name: str | None, param: str = "name") -> ServedModel:
        """Returns the model that `get` finds, or the default model if `name` is None. Raises Fault 404 if there is
        none."""
        if name is None:
            return self.default
        if (model := self.get(name)) is not None:
            return model
        names = self.names()
        message = f"There is no model of that name here.{suggestion(name, names)}"
        hint = f"This server has {', '.join(names)}; a fine-tuned model must be activated or loaded first."
        raise Fault(Code.MODEL_NOT_FOUND, message, param=param, hint=hint)

    def resolve(self, model: str | None, tasks: Sequence[Task] = ()) -> ServedWeights:
        """Returns the weights for a request that names `model`.

        If `model` is None, the first model that can perform one of `tasks` is chosen, or the default model. Raises
        Fault 404 for an unknown name, and 503 while no engine runs.
        """
        if model is not None and (pair := self.get_adapter(model)) is not None:
            base, adapter = pair
            return adapter.served_with(base.resolve())
        return (self._choose(model, tasks) or self.require(str(model), "model")).resolve()

    def suspended(self, model: str | None, tasks: Sequence[Task] = ()) -> ServedModel | None:
        """Returns the model that `resolve` would choose if its new requests wait for an exchange of weights or the end
        of a pause. Afterwards, `resolve` may choose another model."""
        chosen = self._choose(model, tasks)
        return None if chosen is None or chosen.released.is_set() else chosen

    def _choose(self, model: str | None, tasks: Sequence[Task]) -> ServedModel | None:
        chosen = self._first_with_task(tasks) if model is None else self.get(model)
        if chosen is None and (model == PLACEHOLDER or self.default.state == "loading"):
            chosen = self._first_with_task(tasks)  # the name may be that of weights that are still loading
        return chosen

    def _first_with_task(self, tasks: Sequence[Task]) -> ServedModel:
        matches = (m for m in self.models.values() if m.current is not None and m.current.engine.limits.task in tasks)
        return next(matches, self.default) if self.default.current is not None else self.default

    def source_keys(self) -> set[str]:
        """Returns the keys of all served weights and adapters."""
        models = list(self.models.values())
        keys = {model.current.source.key for model in models if model.current is not None}
        return keys | {adapter.source.key for model in models for adapter in list(model.adapters.values())}

    def stats(self) -> Mapping[str, Mapping[str, Any]]:
        """Returns the last statistics of each engine. Sequences that use an adapter count under its name alone."""
        totals: dict[str, Mapping[str, Any]] = {}
        for name, model in self.models.items():
            stats, adapters = model.stats, model.adapter_stats().values()
            without_adapter = {
                key: stats[key] - sum(counts[key] for counts in adapters) for key in SEQUENCE_COUNTS if key in stats
            }
            totals[name] = stats | without_adapter
        return totals

    def adapter_stats(self) -> Mapping[str, Mapping[str, Mapping[str, int]]]:
        """Returns the numbers of running and waiting sequences, by model and adapter."""
        return {name: model.adapter_stats() for name, model in self.models.items()}

    def max_adapters(self) -> Mapping[str, int]:
        """Returns how many adapters one batch of each model can use: each of its sequences may have its own."""
        return {name: model.admission.capacity.num_seqs for name, model in self.models.items()}
