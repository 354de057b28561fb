"""The end of a run after its last step: chooses the checkpoint of the result, judges it, and writes `out/model/`."""

from pathlib import Path

from fp8serve.errors import JobError
from fp8serve.model.readers import reader_notes
from fp8serve.model.storage.files import read_json
from fp8serve.model.stored import open_checkpoint
from fp8serve.train import checkpoint, events
from fp8serve.train.config import TrainConfig
from fp8serve.train.divergence import Outcome
from fp8serve.train.events import OnEvent
from fp8serve.train.export import export


def chosen_of(config: TrainConfig, latest: Path, best_step: int | None, on_event: OnEvent) -> Path:
    """The checkpoint that the result is made of: the last one, where that was asked for or the best one is damaged."""
    best = latest.with_name(f"step-{best_step}")
    if config.result == "last" or best == latest:
        return latest
    if (why := checkpoint.verify(best)) is not None:
        text = f"The best checkpoint, {best.name}, cannot be used ({why}): the result is made of the last one"
        on_event(events.message("best_lost", text, level="warn"))
        return latest
    return best


def judge(config: TrainConfig, chosen: Path, outcome: Outcome, on_event: OnEvent) -> None:
    """When the run made the model worse: JobError, or a warning if the job keeps the model all the same."""
    if outcome.problem is None:
        return
    if config.on_divergence != "keep":
        raise JobError(
            f"{outcome.problem}; lower lr ({config.lr}), or make a model of {chosen} by starting again with "
            'on_divergence="keep" (--on-divergence keep).'
        )
    on_event(events.message("diverged", outcome.problem, level="warn"))


def published(config: TrainConfig, chosen: Path, on_event: OnEvent) -> Path:
    """The model of a checkpoint, in `out/model/`."""
    model = Path(config.out) / "model"
    _set_aside(model, chosen)
    if not model.exists():
        export(chosen, model)
        on_event(events.message("exported", f"The trained model is in {model}", path=str(model)))
        for note in () if config.lora_rank else reader_notes(open_checkpoint(model)):
            on_event(events.message("readers", note, level="warn"))
    return model


def _set_aside(model: Path, chosen: Path) -> None:
    """A model of another step of this run keeps its files under another name, because a server may be using them."""
    if model.exists() and f"step-{(step := read_json(model / 'training.json', JobError)['step'])}" != chosen.name:
        model.rename(model.with_name(f"model-step-{step}"))
