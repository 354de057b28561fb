"""Optional methods of a calibration besides rounding: each changes the job (job.py) that it is given."""

import copy
from collections.abc import Mapping, Sequence

from fp8serve.errors import RecipeError
from fp8serve.model.checkpoint import load_servable
from fp8serve.ranks import Ranks

from .healing import Schedule, heal
from .input_scales import searched_amaxes
from .job import Job
from .options import HEAL_RATE
from .pairs import pairs
from .precision import Target, fewest, ordered, restore
from .result import HealingReport, KeptReport, SmoothingReport
from .smoothing import FACTORS, smooth
from .unfinished import Once
from .words import count


def amaxes_of_inputs(job: Job) -> Mapping[str, float]:
    """Amaxes of inputs whose scale does not come from their history."""
    if job.asked.input_scales != "search":
        return {}
    seen = {name: seen.amax for name, seen in job.observer.seen.items()}
    return searched_amaxes(job.decoder, job.linears, job.batches.calibration, seen, job.stages)


def smooth_weights(job: Job, alpha: float, once: Once, ranks: Ranks) -> None:
    """Change the model's parameters where an input has uneven channels and evening them out helps."""
    samples, config = job.batches.calibration, job.decoder.config
    job.smoothed = smooth(job.decoder, job.linears, samples, job.recipe, alpha, job.stages, once, ranks)
    tried = sum(len(pairs(config, index, job.linears)) for index in range(config.num_layers))
    helped = tuple(name.removesuffix(FACTORS) for name in job.smoothed if name.endswith(FACTORS))
    job.smoothing = SmoothingReport(alpha, helped, tried)
    if config.offset_norms:
        job.notes += ("Smoothing left the norms alone: they multiply by 1 + weight, which holds no factor exactly.",)


def said_of_smoothing(report: SmoothingReport | None) -> tuple[str, ...]:
    """The sentence for the notes."""
    if report is None:
        return ()
    helped = f"{len(report.pairs)} of {count(report.tried, 'input')}"
    return (f"Smoothing evened out the channels of {helped}; the others are better as they are.",)


def meet(job: Job, target: Target) -> None:
    """Leave as many linears in high precision as the target needs. RecipeError when it needs all."""

    def enough(kept: Sequence[KeptReport]) -> bool:
        names = {name for group in kept for name in group.names}
        return target.is_met(job.compare({n: linear for n, linear in job.linears.items() if n not in names})[0])

    candidates = ordered(job.linears, job.shares())
    count = fewest(candidates, enough)
    if count == len(candidates):
        raise RecipeError("The target asks for every linear layer in high precision; allow more, or do not calibrate.")
    restore(job.decoder, job.keep(candidates[:count]))


def heal_weights(job: Job) -> None:
    """Train the model in FP8; the result is dropped if it is no better on the held-out batches."""
    asked, observer = job.asked, job.observer
    rate = asked.heal_rate or HEAL_RATE
    old, seen = copy.deepcopy(job.states), copy.deepcopy(observer.seen)
    before = job.compare()[0].kl_divergence
    healed, losses = heal(
        job.decoder,
        job.linears,
        load_servable(job.source, "bf16", device=asked.device),
        job.batches.calibration,
        job.recipe,
        Schedule(asked.heal, rate),
        observer,
        rounded=job.rounded,
        seed=asked.seed,
        stages=job.stages,
    )
    after = job.compare(rounded=healed)[0].kl_divergence
    job.healing = HealingReport(asked.heal, rate, tuple(losses), before, after)
    if job.healing.helped:
        job.rounded = healed
    else:
        job.states, observer.seen = old, seen


def said_of_healing(report: HealingReport | None) -> tuple[str, ...]:
    """The sentence for the notes."""
    if report is None:
        return ()
    change = f"KL on the held-out samples from {report.kl_before:.4f} to {report.kl_after:.4f} nats"
    kept = "" if report.helped else ", which is no better: the weights were written as they were before"
    return (f"Healing took {report.steps} steps and moved the {change}{kept}.",)
