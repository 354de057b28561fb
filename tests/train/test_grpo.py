"""GRPO: its losses are those of the papers, importance ratios are exactly 1 before the first update of a step, and a
reward that fails or hangs ends the run with one sentence."""

import itertools
import json
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fp8serve.engine.engine import Engine
from fp8serve.errors import DataError, JobError
from fp8serve.fp8.batch_invariant import has_batch_invariant_products
from fp8serve.model.checkpoint import load_servable
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.train import checkpoint, state
from fp8serve.train.config import TrainConfig
from fp8serve.train.data import Row
from fp8serve.train.forward import PackedBatch
from fp8serve.train.methods.grpo import grading
from fp8serve.train.methods.grpo.data import GrpoReader
from fp8serve.train.methods.grpo.grading import FileGrader, RewardInput, UrlGrader
from fp8serve.train.methods.grpo.method import Completion, Group, Grpo, advantages, token_loss_weights
from fp8serve.train.methods.grpo.rollouts import served_state
from fp8serve.train.setup import prepare
from fp8serve.train.trainer import Trainer
from fp8serve.train.validate import validate
from tests.patience import PATIENCE

from .conftest import TEXTS, Configure, write_lines
from .test_resume import assert_same_when_killed
from .test_trainer import after, of_type

LETTERS = "def reward(prompt, completion, row):\n    return completion.count(row['letter']) / (1 + len(completion))\n"
LOG_PROB_DIFFERENCE = "sampling/sampling_logp_difference/mean"
RATIO = "sampling/importance_sampling_ratio/mean"
exact = pytest.mark.skipif(not has_batch_invariant_products("cpu"), reason="the CPU kernels are not built")


@pytest.fixture
def grpo(configure: Configure, tmp_path: Path) -> Configure:
    rows = write_lines(tmp_path / "prompts.jsonl", [{"prompt": t[:20], "letter": "e"} for t in TEXTS[:8]])
    (tmp_path / "letters.py").write_text(LETTERS)

    def make(**values: Any) -> TrainConfig:
        small = {"batch_size": 2, "num_generations": 3, "seq_len": 32, "max_completion_length": 8, "max_steps": 4}
        settings = {"method": "grpo", "data": [str(rows)], **small, **values}
        source = {} if "grader_url" in values else {"reward": str(tmp_path / "letters.py")}
        return configure(**{**source, **settings})

    return make


def metrics_of(config: TrainConfig) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    Trainer(config).run(events.append)
    return of_type(events, "metrics")


# -- the loss ----------------------------------------------------------------------------------------------------------


def reference_loss(logits: Tensor, groups: Sequence[Group], config: TrainConfig) -> Tensor:
    """Returns the sum of the losses of all completions by the formulas of the papers, token by token in FP64."""
    answers = [answer for group in groups for answer in group.completions]
    total, position = torch.zeros((), dtype=torch.float64), 0
    tokens = sum(len(answer.old_log_probs) for answer in answers)
    low, high, beta = config.epsilon, config.epsilon_high or config.epsilon, config.beta or 0.0
    for answer in answers:
        targets, losses = answer.row.ids[answer.row.loss], []
        for token, old, reference in zip(targets, answer.old_log_probs, answer.ref_log_probs, strict=True):
            log_prob = (logits[position].double() / config.temperature).log_softmax(-1)[int(token)]
            ratio, log_ratio_to_ref = (log_prob - float(old)).exp(), float(reference) - log_prob
            best = torch.minimum(ratio * answer.advantage, ratio.clamp(1 - low, 1 + high) * answer.advantage)
            losses.append(-best + beta * (log_ratio_to_ref.exp() - log_ratio_to_ref - 1))
            position += 1
        divisor = {"grpo": len(losses), "dapo": tokens / len(answers), "dr_grpo": config.max_completion_length or 1}
        total = total + torch.stack(losses).sum() / divisor[config.loss_type or "dapo"]
    return total


def random_groups(config: TrainConfig) -> list[Group]:
    """Returns two groups of completions of different lengths."""
    rng = np.random.default_rng(0)
    lengths = [3, 8, 5, 1, 6, 4]
    weights = token_loss_weights(lengths, config.loss_type or "dapo", config.max_completion_length or 1)  # type: ignore[arg-type]
    rewards = torch.tensor([[0.0, 1.0, 0.5], [1.0, 1.0, 0.25]], dtype=torch.float64)
    completions = []
    for n, weight, reward, advantage in zip(
        lengths,
        weights,
        rewards.flatten().tolist(),
        advantages(rewards, config.scale_rewards).flatten().tolist(),
        strict=True,
    ):
        row = Row(rng.integers(0, 320, n + 4).astype(np.int32), np.arange(n + 4) >= 4)
        old, reference = (-rng.random(n).astype(np.float32) * 6 for _ in range(2))
        completions.append(Completion(row, old, False, reward, advantage, weight, 6 / 27, old, reference))
    return [Group(tuple(completions[:3])), Group(tuple(completions[3:]))]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_type": "grpo", "beta": 0.3},
        {"loss_type": "dr_grpo", "scale_rewards": "none", "epsilon_high": 0.5},
        {"temperature": 0.7, "beta": 0.1, "scale_rewards": "batch"},
    ],
    ids=str,
)
def test_losses_and_gradients_match_the_papers(grpo: Configure, options: dict[str, Any]) -> None:
    config = grpo(**options)
    groups = random_groups(config)
    torch.manual_seed(0)
    logits = (4 * torch.randn(27, 320)).requires_grad_()

    def answer(batch: PackedBatch) -> Tensor:
        return logits

    loss, reward, *_ = Grpo(config).compute_sums(answer, groups)
    expected = reference_loss(logits, groups, config)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    (ours,), (theirs,) = (torch.autograd.grad(each, logits) for each in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)
    assert float(reward) == 3.75
    assert Grpo(config).count_loss_terms(groups) == 6


def test_advantages() -> None:
    rewards = torch.tensor([[0.0, 1.0], [2.0, 2.0]], dtype=torch.float64)
    within, across = 0.5**0.5 + 1e-4, float(rewards.std()) + 1e-4
    for scale, divisor in {"group": within, "batch": across, "none": 1.0}.items():
        actual = advantages(rewards, scale)  # type: ignore[arg-type]
        assert actual.tolist() == [[pytest.approx(-0.5 / divisor), pytest.approx(0.5 / divisor)], [0, 0]]


# -- a run -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_mean_reward_rises(grpo: Configure) -> None:
    metrics = metrics_of(grpo(max_steps=24, batch_size=4, num_generations=8, lr=1e-2))
    first, last = (sum(m["reward"] for m in part) / 4 for part in (metrics[:4], metrics[-4:]))
    assert last > 1.5 * first
    assert "reward=" in metrics[-1]["message"]


@pytest.mark.slow
@exact
@pytest.mark.parametrize("recipe", ["bf16", "delayed"])
def test_a_hundred_steps_of_ratios_that_are_one(grpo: Configure, recipe: str) -> None:
    """In the first update of each step, the trainer's log-probabilities equal those that the engine sampled with."""
    metrics = metrics_of(grpo(recipe=recipe, max_steps=100, num_generations=2, max_completion_length=4, lr=3e-3))
    assert len(metrics) == 100
    assert {m[LOG_PROB_DIFFERENCE] for m in metrics} == {0.0}
    assert all(m[RATIO] == pytest.approx(1, abs=1e-12) for m in metrics)
    assert len({m["grad_norm"] for m in metrics}) > 50  # the weights change


@exact
@pytest.mark.parametrize(
    "options",
    [
        {"recipe": "rowwise"},
        {"recipe": "block"},
        {"recipe": "nvfp4"},
        {"recipe": "delayed", "accumulate": 3, "batch_size": 1, "num_iterations": 2, "beta": 0.1},
        {"recipe": "delayed", "master_weights": "optimizer"},
        {"recipe": "delayed", "temperature": 0.7, "num_iterations": 2},
        {"recipe": "delayed", "recipe_options": {"override_linear_precision": [False, True, True]}},
        {"recipe": "bf16", "lora_rank": 4, "lr": 1e-2, "beta": 0.1},
        {"recipe": "rowwise", "lora_rank": 4, "lr": 1e-2, "dora": True},
    ],
    ids=str,
)
def test_ratios_are_one_whatever_the_recipe(grpo: Configure, options: dict[str, Any]) -> None:
    metrics = metrics_of(grpo(**{"max_steps": 5, "lr": 3e-3, **options}))
    assert {m[LOG_PROB_DIFFERENCE] for m in metrics} == {0.0}
    assert all(m[RATIO] == pytest.approx(1, abs=1e-12) for m in metrics)
    if "beta" in options:
        assert all(m["kl"] >= 0 for m in metrics)
        assert (metrics[0]["kl"] == 0) is (
            options.get("num_iterations", 1) == 1
        )  # a second iteration starts from changed weights
        assert metrics[-1]["kl"] > 0


def test_a_recipe_whose_log_probs_depend_on_the_batch_is_announced(grpo: Configure) -> None:
    events: list[dict[str, Any]] = []
    Trainer(grpo(recipe="current", max_steps=2)).run(events.append)
    assert any(e.get("code") == "log_probs_differ" for e in events)
    assert all(m[RATIO] == pytest.approx(1, abs=0.1) for m in of_type(events, "metrics"))


@exact
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "rowwise", "block", "nvfp4"])
def test_weights_given_to_the_engine_equal_the_exported_ones(grpo: Configure, recipe: str) -> None:
    config = grpo(recipe=recipe, max_steps=3)
    result = Trainer(config).run()
    run = prepare(config, Path(str(result.checkpoint)), lambda event: None)
    state.restore(run.forward, run.optimizer, checkpoint.read_checkpoint(Path(str(result.checkpoint))))
    recipe_to_load: Any = "bf16" if recipe == "bf16" else "stored"
    expected = load_servable(str(result.model), recipe_to_load).state_dict()
    actual = served_state(run.forward)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype is tensor.dtype
        assert actual[name].shape == tensor.shape or tensor.numel() == 1
        assert torch.equal(actual[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name
    engine = Engine(config.model if recipe == "bf16" else str(result.model), recipe=recipe_to_load)
    engine.load_weights(actual)


@pytest.mark.parametrize("masters", ["model", "optimizer"])
def test_weights_given_to_the_engine_share_no_memory_with_the_run(
    grpo: Configure, model_dir: Path, masters: str
) -> None:
    run = prepare(grpo(recipe="rowwise", master_weights=masters), model_dir, lambda event: None)
    own = {tensor.data_ptr() for tensor in run.forward.network.state_dict().values()}
    assert not own & {tensor.data_ptr() for tensor in served_state(run.forward).values()}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"beta": 0.1, "num_iterations": 2}, {"lora_rank": 4, "recipe": "bf16"}], ids=str)
def test_a_killed_and_resumed_run_writes_the_same_files(
    tmp_path: Path, grpo: Configure, options: dict[str, Any]
) -> None:
    names = ["model/training.json", "checkpoints/step-6/manifest.json"]
    names += ["reference.safetensors"] if "beta" in options and "lora_rank" not in options else []
    assert_same_when_killed(tmp_path, grpo, names, max_steps=6, **options)


def test_a_missing_reference_file_is_refused_on_resume(grpo: Configure, tmp_path: Path) -> None:
    Trainer(grpo(beta=0.1, save_every=1)).run(stop=after(2))
    (tmp_path / "out" / "reference.safetensors").unlink()
    with pytest.raises(JobError, match="which the run saved at its start, is missing"):
        Trainer(grpo(beta=0.1, save_every=1)).run()


def test_resuming_with_other_reward_columns_is_refused(grpo: Configure, tmp_path: Path) -> None:
    Trainer(grpo(max_steps=1)).run()
    write_lines(tmp_path / "prompts.jsonl", [{"prompt": t[:20], "letter": "a"} for t in TEXTS[:8]])
    with pytest.raises(JobError, match="training data differ"):
        Trainer(grpo(max_steps=2)).run()


# -- rewards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def reward(", "cannot be used: SyntaxError"),
        ("import no_such_module", "cannot be used: ModuleNotFoundError: No module named 'no_such_module'"),
        ("x = 1", "cannot be used: TypeError: it has no function `reward"),
        ("import os; os._exit(3)", "ended when it was imported (exit status 3)"),
        ("def reward(p, c, r): return r['nothing']", "failed on a completion of {data}:1: KeyError: 'nothing'"),
        ("def reward(p, c): return 1", "failed on a completion of {data}:1: TypeError: reward() takes 2"),
        ("def reward(p, c, r): return 'good'", "failed on a completion of {data}:1: ValueError: could not convert"),
        (
            "def reward(p, c, r): return float('nan')",
            "returned nan for a completion of {data}:1; a reward is a finite number",
        ),
        ("def reward(p, c, r): raise SystemExit(0)", "failed on a completion of {data}:1: SystemExit: 0"),
        ("import os\ndef reward(p, c, r): os._exit(0)", "ended on a completion of {data}:1 (exit status 0)"),
        ("import os\ndef reward(p, c, r): os.kill(os.getpid(), 9)", "on a completion of {data}:1 (killed by SIGKILL)"),
    ],
)
def test_a_reward_that_fails_is_reported_in_one_sentence(
    grpo: Configure, tmp_path: Path, code: str, message: str
) -> None:
    (tmp_path / "bad.py").write_text(code)
    one = write_lines(tmp_path / "one.jsonl", [{"prompt": TEXTS[0][:20]}])
    with pytest.raises(JobError) as caught:
        Trainer(grpo(reward=str(tmp_path / "bad.py"), data=[str(one)])).run()
    assert message.format(data=one) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_reward_that_hangs_is_killed_and_reported(tmp_path: Path) -> None:
    """Its process is killed, although it ignores SIGTERM."""
    file = tmp_path / "hangs.py"
    file.write_text("import signal, time\nsignal.signal(15, signal.SIG_IGN)\ndef reward(p, c, r): time.sleep(1e6)")
    grader = FileGrader(file, PATIENCE)
    grader.seconds = 0.2  # the import may take longer on a busy machine
    with pytest.raises(JobError, match=r"took more than 0\.2 seconds on a completion of x:1"):
        grader.rewards([RewardInput("a", "b", {}, "x:1")])
    assert grader._process.poll() == -9


def test_a_reward_gets_prompt_completion_and_row_and_may_print_and_import(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its output goes to stderr and is not taken for a reward, and it can import modules from its own directory."""
    (tmp_path / "beside.py").write_text("FACTOR = 2")
    file = tmp_path / "reward.py"
    file.write_text(
        "from beside import FACTOR\nprint('hello')\n"
        "def reward(prompt, completion, row):\n"
        "    print(prompt)\n    return FACTOR * len(completion) + row['more'] + len(prompt)\n"
    )
    grader = FileGrader(file, 60)
    messages = [{"role": "user", "content": "é\n\u2028"}]
    inputs = [RewardInput("a", "bc", {"more": 1}, "x:1"), RewardInput(messages, "", {"more": 0.5}, "x:2")]
    assert grader.rewards(inputs) == [6.0, 1.5]
    grader.close()
    assert grader._process.poll() is not None
    assert "hello" in capfd.readouterr().err
    with pytest.raises(JobError, match="The reward file"):
        FileGrader(tmp_path / "none.py", 1)


@pytest.mark.parametrize("reply", ["not JSON", "7", "[" * 100_000], ids=["text", "number", "deep"])
def test_an_invalid_reply_of_a_reward_process_is_reported_in_one_sentence(reply: str, tmp_path: Path) -> None:
    """The reward file can write to the file descriptor that carries the replies."""
    file = tmp_path / "noisy.py"
    file.write_text(f"import os\ndef reward(p, c, r):\n    os.write(3, {reply.encode()!r} + b'\\n')\n    return 1.0\n")
    grader = FileGrader(file, PATIENCE)
    with pytest.raises(JobError, match="sent an invalid reply on a completion of x:1"):
        grader.rewards([RewardInput("a", "b", {}, "x:1")])
    assert grader._process.poll() is not None


class _Grader(BaseHTTPRequestHandler):
    """A grader that gives valid replies or, depending on the path, one kind of invalid reply."""

    failures: ClassVar = itertools.count()

    def do_POST(self) -> None:
        answers = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["answers"]
        rewards = [float(len(one["completion"])) for one in answers]
        flaky = 200 if next(self.failures) else 503
        status = {"/moved": 307, "/refuses": 404, "/fails": 500, "/flaky": flaky}.get(self.path, 200)
        body = {"/fewer": {"rewards": rewards[:-1]}, "/words": {"rewards": ["good"] * len(answers)}, "/list": rewards}
        payload = json.dumps(body.get(self.path, {"rewards": rewards})).encode()
        payload = b"<html>" if self.path == "/html" else payload
        self.send_response(status)
        self.send_header("Location", "/grade")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""


@pytest.fixture(scope="module")
def grader_url() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Grader)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


ASKED = [RewardInput("a", "b" * n, {}, f"x:{n}") for n in range(3)]


@pytest.mark.parametrize("path", ["grade", "flaky"])
def test_a_grader_url_gives_rewards(grader_url: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "RETRY_SECONDS", 0.0)
    monkeypatch.setattr(_Grader, "failures", itertools.count())
    assert UrlGrader(f"{grader_url}/{path}", 60).rewards(ASKED) == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("moved", "returned no rewards: it answered with status 307"),
        ("refuses", "returned no rewards: it answered with status 404"),
        ("fails", "returned no rewards: it answered with status 500"),
        ("fewer", "returned 2 rewards for 3 completions"),
        ("words", "returned 'good' for a completion of x:0; a reward is a finite number"),
        ("html", "did not answer with JSON such as"),
        ("list", "did not answer with JSON such as"),
    ],
)
def test_an_invalid_reply_of_a_grader_url_is_reported(
    grader_url: str, path: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grading, "RETRY_SECONDS", 0.0)
    with pytest.raises(JobError) as caught:
        UrlGrader(f"{grader_url}/{path}", 60).rewards(ASKED)
    assert message in str(caught.value)


def test_an_unreachable_grader_url_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "RETRY_SECONDS", 0.0)
    with pytest.raises(JobError, match="returned no rewards"):
        UrlGrader("http://127.0.0.1:1/grade", 60).rewards(ASKED)


def test_a_run_gets_rewards_from_a_grader_url(grpo: Configure, grader_url: str) -> None:
    metrics = metrics_of(grpo(grader_url=f"{grader_url}/grade", max_steps=2))
    assert all(m["reward"] > 0 for m in metrics)


# -- data and options --------------------------------------------------------------------------------------------------

USER, ANSWER = {"role": "user", "content": "red or blue?"}, {"role": "assistant", "content": "blue"}


def test_a_conversation_has_the_same_prompt_in_every_data_format(model_dir: Path) -> None:
    tokenizer = Tokenizer.from_dir(model_dir)
    forms = [{"prompt": [USER]}, {"messages": [USER], "answer": 3}, {"prompt": json.dumps([USER])}]
    examples = [GrpoReader(8).parse_row(form, "x:1") for form in forms[:2]]
    (one, other), counts = GrpoReader(8).tokenize(examples, tokenizer, 64)
    assert one.row.ids.tolist() == other.row.ids.tolist() == tokenizer.encode_chat([dict(USER)])
    assert not one.row.loss.any()
    assert (counts.rows, counts.trainable_tokens) == (2, 0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "x:1 has only ['text']; give one of `prompt` and `messages`."),
        ({"prompt": "a", "messages": [USER]}, "x:1 has both `prompt` and `messages`"),
        ({"prompt": ""}, "x:1: `prompt` is empty."),
        ({"prompt": []}, "x:1: `prompt` is not a list of messages"),
        ({"prompt": 3}, "x:1: `prompt` is not a list of messages"),
        ({"prompt": [USER, ANSWER]}, "`prompt` ends with the assistant's turn, which the model must generate"),
        ({"messages": [{"role": "user"}]}, "x:1: message 0 has no text"),
        ("[1]", "x:1 is a list where an object was expected"),
    ],
)
def test_the_error_of_a_bad_row_is_one_sentence_that_names_its_line(row: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        GrpoReader(8).parse_row(row, "x:1")
    assert message in str(caught.value)


def test_a_dry_run_lists_bad_rows_and_drops_prompts_without_room(grpo: Configure, tmp_path: Path) -> None:
    rows = [{"prompt": TEXTS[0][:20]}, {"text": "a"}, {"prompt": TEXTS[1] * 9}]
    report = validate(grpo(data=[str(write_lines(tmp_path / "d.jsonl", rows))]))
    assert [bad["line"] for bad in report.bad_lines] == [2]
    assert (report.data.rows, report.data.dropped_rows) == (1, 1)
    prose = tmp_path / "prose.txt"
    prose.write_text("Nobody asks this.")
    with pytest.raises(DataError, match="is prose, which holds no prompts"):
        list(GrpoReader(8).read_examples(prose))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "sft", "num_generations": 4}, "num_generations is an option of the method grpo; give method grpo"),
        ({"method": "sft", "beta": 0.1}, "beta is an option of the method dpo or grpo"),
        ({"reward": None}, "needs one source of rewards: give either reward"),
        ({"grader_url": "http://x/y", "reward": "x.py"}, "needs one source of rewards"),
        ({"grader_url": "file:///etc/passwd"}, "grader_url must be an address such as"),
        ({"loss_type": "simpo"}, "loss_type simpo is no loss of the method grpo; give dapo, grpo, dr_grpo"),
        ({"label_smoothing": 0.1}, "label_smoothing is an option of the method dpo"),
        ({"max_completion_length": 32}, "leaves no token of seq_len (32) for the prompt"),
        ({"eval_data": ["x.jsonl"]}, "eval_data is evaluated by the loss"),
        ({"packing": "tokens"}, "packing needs rows of known length"),
        ({"lora_rank": 4, "lora_dropout": 0.1, "recipe": "bf16"}, "lora_dropout must be 0 with the method grpo"),
        ({"num_generations": 1}, "num_generations must be at least 2"),
        ({"epsilon": 1.0}, "epsilon must be less than 1"),
    ],
)
def test_contradictory_options_are_refused(grpo: Configure, values: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as caught:
        grpo(**values)
    assert message in str(caught.value)
