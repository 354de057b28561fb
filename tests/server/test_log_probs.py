"""Log-probabilities over HTTP equal those of training to the last bit, for every recipe, and for every way in which a
server computes one."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.studies import parity
from fp8serve.fp8.batch_invariant import has_batch_invariant_products
from tests.engine.tiny import write_model, write_scales
from tests.patience import until
from tests.server.process import Process, serving

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_batch_invariant_products("cpu"), reason="the CPU kernels are not built"),
]
STEP = 24  # tokens: a longer prompt is cut into chunks
SERVED = {
    **{recipe: (recipe, "bf16") for recipe in parity.RECIPES if recipe != "delayed"},
    "delayed-fp8": ("delayed", "fp8"),
}
"""(recipe, type of the cache) of the further models by name; the first model is "delayed". tests/train tests the FP8
cache under the other recipes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose sizes are multiples of MX blocks and of no other tile. Its sliding window is shorter than the
    longest prompt."""
    path = tmp_path_factory.mktemp("log-probs") / "delayed"
    sizes = {"hidden_size": 96, "intermediate_size": 224, "num_attention_heads": 4, "num_key_value_heads": 2}
    write_model(path, "mistral", head_dim=40, sliding_window=40, **sizes)
    write_scales(path, path / "scales.safetensors", kv=True)
    return path


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Process]:
    engine: dict[str, Any] = {"max_batch_tokens": STEP, "max_num_seqs": 8, "block_size": 4}
    engine_options = "".join(f",{name}={value}" for name, value in engine.items())
    others = [
        f"{name}={model},recipe={parity.served_as(recipe)},kv_cache_dtype={cache}{engine_options}"
        for name, (recipe, cache) in SERVED.items()
    ]
    options = {"model": str(model), "data_dir": str(model.parent / "data"), "models": others, **engine}
    with serving(model.parent / "log", **options) as process:
        until(lambda: states(process) == {"ready"}, "every model")
        yield process
        assert process.stop() == 0
        assert "Traceback" not in process.log.read_text()


def states(server: Process) -> set[str]:
    return {model["state"] for model in server.client.get("/models").json()["models"]}


def post(server: Process, route: str, body: Any) -> Any:
    answer = server.client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(256) for _ in range(length)] for length in (60, 9, 17, 1)]


@pytest.mark.parametrize(
    ("name", "recipe", "cache"),
    [("delayed", "delayed", "bf16"), *((name, *how) for name, how in SERVED.items())],
)
def test_a_server_returns_the_log_probabilities_of_training(
    server: Process, model: Path, name: str, recipe: str, cache: Any
) -> None:
    cached = server.metric("fp8serve_prompt_tokens_cached_total")
    served = parity.ask(lambda route, body: post(server, route, body), name, prompts())
    assert server.metric("fp8serve_prompt_tokens_cached_total") > cached
    counts = parity.compare(served, parity.training(model, recipe, cache))
    assert {way: (count.equal, count.worst) for way, count in counts.items()} == {
        way: (count.tokens, 0.0) for way, count in counts.items()
    }
    assert {way: count.tokens for way, count in counts.items()} == {
        "prompt": 8 + 16,
        "prompt in chunks": 59,
        "decoding": 4 * parity.NEW,
        "cached prefix": parity.NEW // 2,
        "among others": 4 * parity.NEW + 59 + 8 + 16,
    }


def test_info_says_for_which_models_log_probabilities_differ(server: Process) -> None:
    def because(name: str) -> list[str]:
        engine = server.client.get("/info", params={"model": name}).json()["engine"]
        assert engine["log_probs_as_trained"] is not bool(engine["log_probs_differ_because"])
        return engine["log_probs_differ_because"]  # type: ignore[no-any-return]

    reasons = {name: because(name) for name in ("delayed", *SERVED)}
    assert [name for name, why in reasons.items() if why] == ["delayed-fp8"]
    assert "FP8 cache" in reasons["delayed-fp8"][0]


@pytest.mark.smoke
def test_usage_says_how_much_of_prompts_the_cache_held(server: Process) -> None:
    """Each prompt counts once, whatever its number of answers."""
    rng = random.Random(1)
    body = {"prompt": [[rng.randrange(256) for _ in range(42)] for _ in range(2)], "n": 2, "max_tokens": 1}
    first, second = (post(server, "/v1/completions", body)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["prompt_tokens_details"] == {"cached_tokens": 2 * 40}
