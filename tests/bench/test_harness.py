"""lm-eval on the engine: scores equal the decoder's log-probabilities; generation; three tasks that run offline."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fp8serve.calibration.data import Sample, make_batches
from fp8serve.calibration.passes import forward
from fp8serve.model.checkpoint import load_servable
from tests.calibration.conftest import write_model

pytest.importorskip("lm_eval", reason="lm-eval is not installed; pip install 'fp8serve[lm-eval]'")
pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of lm-eval and its packages

TASKS = Path(__file__).resolve().parents[2] / "benchmarks/tasks"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("harness") / "tiny")


@pytest.fixture(scope="module")
def harness(model: Path) -> Any:
    from fp8serve.bench.harness import EngineLM

    return EngineLM(str(model), recipe="bf16")


def test_the_default_device_is_the_cpu_without_a_gpu(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8serve.bench.harness import EngineLM

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert EngineLM(str(model), device="cuda:0", recipe="bf16").engine.options.device == "cpu"


def log_probabilities(model: Path, ids: list[int]) -> torch.Tensor:
    decoder = load_servable(model, "bf16")
    (batch,) = make_batches([Sample(tuple(ids), (True,) * len(ids))], 1)
    with torch.no_grad():
        return decoder.logits(forward(decoder, batch)).float().log_softmax(-1)


def request(*args: Any) -> Any:
    return SimpleNamespace(args=args)


def test_a_continuation_is_scored_token_by_token(harness: Any, model: Path) -> None:
    context, continuation = "The city lies", " by a river"
    ids, before = harness.tok_encode(context + continuation), len(harness.tok_encode(context))
    log_p = log_probabilities(model, ids)
    expected = sum(float(log_p[i - 1, ids[i]]) for i in range(before, len(ids)))
    ((logprob, greedy),) = harness.loglikelihood([request(context, continuation)], disable_tqdm=True)
    assert logprob == pytest.approx(expected, abs=0.05)  # attention sums in another order, in BF16
    assert greedy == all(int(log_p[i - 1].argmax()) == ids[i] for i in range(before, len(ids)))


def test_scores_do_not_depend_on_other_requests(harness: Any) -> None:
    context, *texts = (harness.tok_encode(text) for text in ("The city lies", " by", " a river"))
    pairs = [(None, context, text) for text in (*texts, [])]
    alone = [harness._loglikelihood_tokens([pair])[0] for pair in pairs]
    assert harness._loglikelihood_tokens([*pairs, *reversed(pairs)]) == [*alone, *reversed(alone)]
    assert alone[2] == (0.0, True)
    assert harness._loglikelihood_tokens([]) == []


def test_a_continuation_longer_than_the_context_is_truncated(harness: Any) -> None:
    long = harness.tok_encode("river and hill and town " * 40)
    ((logprob, _),) = harness._loglikelihood_tokens([(None, [long[0]], long)])
    assert logprob < 0


def test_a_greedy_answer_is_scored_as_greedy(harness: Any) -> None:
    prompt = harness.tok_encode("The city lies")
    (completion,) = harness.engine.generate([prompt], max_new_tokens=4, temperature=0.0, ignore_eos=True)
    scored = harness._loglikelihood_tokens([(None, prompt, list(completion.token_ids))])
    assert scored[0][1]


def test_rolling_covers_a_text_longer_than_the_context(harness: Any) -> None:
    words = "river and hill and town " * 40
    assert len(harness.tok_encode(words)) > harness.max_prompt_tokens
    short, long = harness.loglikelihood_rolling([request("river and hill"), request(words)])
    assert long < short < 0


def test_answers_end_before_a_stop_text(harness: Any) -> None:
    (free,) = harness.generate_until([request("The city lies", {"max_gen_toks": 8})])
    assert free
    (cut,) = harness.generate_until([request("The city lies", {"max_gen_toks": 8, "until": [free[2:4]]})])
    assert free.startswith(cut)
    assert free[2:4] not in cut


def test_three_tasks_run_offline(harness: Any) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    names = ["fp8serve_arithmetic", "fp8serve_python", "fp8serve_cloze"]
    results = lm_eval.simple_evaluate(
        harness, tasks=names, limit=4, bootstrap_iters=0, task_manager=TaskManager(include_path=str(TASKS))
    )
    assert set(results["results"]) == set(names)
    assert all(0 <= figures["acc,none"] <= 1 for figures in results["results"].values())
