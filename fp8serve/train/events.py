"""What a run reports: flat JSON objects, one shape for the terminal, the job's log and the HTTP routes.

Every event has `type`, `level` ("info", "warn" or "error") and `message` (one sentence for a person). By type:

    message      `code` says which: data, rows_dropped, overlap, kept, widened, seeded, adapter, rank_too_large,
                 scales_observed, reference, resumed, sweep, checkpoint_broken, machine_changed, length_changed,
                 step_skipped, loss_spike, loss_risen, overflow, underflow, nonfinite, scale_jump (`train.health`),
                 returned (`train.fallback`), diverged, stopped, exported, readers, tokenized, tokenized_lost,
                 report_lost, error
    metrics      step, total_steps, epoch, train_loss, the measures of the method (train_mean_token_accuracy;
                 rewards/chosen, rewards/rejected, rewards/accuracies, rewards/margins, logps/chosen, logps/rejected;
                 reward, reward_std, completions/mean_length, clip_ratio/region_mean, kl, ...),
                 learning_rate, grad_norm, tokens_per_second, trained_tokens; returns (how often the run has gone back)
                 if it has; after a validation pass also valid_loss and the same measures
                 (valid_mean_token_accuracy; valid_rewards/chosen, ...). A value that is not finite is null
    checkpoint   step, path, and the latest metrics of that step (train_loss, ...)

`level`, `message` and `type` are those of an OpenAI fine-tuning job event; the rest is its `data`. The worker adds `id`
and `created_at`.
"""

from collections.abc import Callable, Mapping
from typing import Any

Event = dict[str, Any]
OnEvent = Callable[[Event], None]


def message(code: str, text: str, *, level: str = "info", **data: Any) -> Event:
    return {"type": "message", "level": level, "code": code, "message": text, **data}


def metrics(values: dict[str, Any], words: Mapping[str, str]) -> Event:
    """words: the entries of `values` that the message shows beside the losses, with the names that it gives them."""
    named = {"train_loss": "training loss", **words, "valid_loss": "validation loss"}
    said = ", ".join(f"{word}={_number(values[name])}" for name, word in named.items() if name in values)
    text = f"Step {values['step']}/{values['total_steps']}: {said}"
    return {"type": "metrics", "level": "info", "message": text, **values}


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def checkpoint(path: str, values: dict[str, Any]) -> Event:
    text = f"Checkpoint written at step {values['step']}"
    return {"type": "checkpoint", "level": "info", "message": text, **values, "path": path}
