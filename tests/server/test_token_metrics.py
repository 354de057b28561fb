"""Token metrics are updated once in a turn of the event loop, with the same result as an update for every token."""

import asyncio

from fp8serve.server.metrics import INTER_TOKEN, Metrics

SECONDS = [0.0, 0.001, 0.0011, 0.03, 0.03, 79.0, 1000.0]


async def test_tokens_are_counted_as_if_each_were_observed() -> None:
    metrics = Metrics()
    model, other = metrics.for_model("m"), metrics.for_model("other")
    for turn in range(2):
        for number, seconds in enumerate(SECONDS):
            model.token_counts.add(number + 1, seconds)
            for _ in range(number + 1):
                other.inter_token.observe(seconds)
                other.generated_tokens.inc()
        await asyncio.sleep(0)
        assert _samples(metrics, "m") == _samples(metrics, "other"), turn
    assert _samples(metrics, "m")["fp8serve_generated_tokens_total", None] == 2 * 28
    assert len(_samples(metrics, "m")) == len(INTER_TOKEN) + 1 + 3


def _samples(metrics: Metrics, model: str) -> dict[tuple[str, str | None], float]:
    families = ("fp8serve_inter_token_seconds", "fp8serve_generated_tokens")
    return {
        (sample.name, sample.labels.get("le")): round(sample.value, 9)
        for family in metrics.registry.collect()
        if family.name in families
        for sample in family.samples
        if sample.labels["model"] == model and not sample.name.endswith("_created")
    }
