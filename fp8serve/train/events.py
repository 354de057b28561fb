"""What a run tells its owner: flat JSON objects, one shape for the terminal, the job's log and the HTTP routes.

Every event has `type`, `level` ("info", "warn" or "error") and `message` (one sentence for a person). By type:

    message      `code` says which: data, rows_dropped, kept, seeded, adapter, scales_observed, resumed, sweep,
                 checkpoint_broken, machine_changed, length_changed, step_skipped, diverged, stopped, exported,
                 readers, error
    metrics      step, total_steps, epoch, train_loss, train_mean_token_accuracy, learning_rate, grad_norm,
                 tokens_per_second, trained_tokens; after a validation pass also valid_loss,
                 valid_mean_token_accuracy; a value that is not finite is null
    checkpoint   step, path, and the latest metrics of that step (train_loss, ...)

`level`, `message` and `type` are those of an OpenAI fine-tuning job event; the rest is its `data`. The worker adds `id`
and `created_at`.
"""

from collections.abc import Callable
from typing import Any

Event = dict[str, Any]
OnEvent = Callable[[Event], None]


def message(code: str, text: str, *, level: str = "info", **data: Any) -> Event:
    return {"type": "message", "level": level, "code": code, "message": text, **data}


def metrics(values: dict[str, Any]) -> Event:
    text = f"Step {values['step']}/{values['total_steps']}: training loss={_number(values['train_loss'])}"
    if "valid_loss" in values:
        text += f", validation loss={_number(values['valid_loss'])}"
    return {"type": "metrics", "level": "info", "message": text, **values}


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def checkpoint(path: str, values: dict[str, Any]) -> Event:
    text = f"Checkpoint written at step {values['step']}"
    return {"type": "checkpoint", "level": "info", "message": text, **values, "path": path}
