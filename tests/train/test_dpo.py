"""DPO: its losses are those of the papers, reference scores are stored with checkpoints, and pairs are read from all
common data formats."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fp8serve.errors import DataError, JobError
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.train.config import TrainConfig
from fp8serve.train.forward import PackedBatch
from fp8serve.train.log_probs import log_probs
from fp8serve.train.methods.dpo.data import DpoReader, Pair
from fp8serve.train.methods.dpo.method import Dpo
from fp8serve.train.trainer import Trainer
from fp8serve.train.validate import validate

from .conftest import TEXTS, Configure, write_lines
from .test_resume import assert_same_when_killed
from .test_trainer import of_type

PAIRS = [{"prompt": t[:30], "chosen": t[30:60], "rejected": t[50:90]} for t in TEXTS[:12]]


@pytest.fixture
def dpo(configure: Configure, tmp_path: Path) -> Configure:
    path = write_lines(tmp_path / "pairs.jsonl", PAIRS)

    def make(**values: Any) -> TrainConfig:
        return configure(**{"method": "dpo", "data": [str(path)], "max_steps": 8, **values})

    return make


# -- the loss ----------------------------------------------------------------------------------------------------------


def reference_loss(logits: Tensor, pairs: Sequence[Pair], config: TrainConfig) -> Tensor:
    """Returns the sum of the losses of all pairs by the formulas of the papers, completion by completion in FP64."""
    beta = config.beta if config.beta is not None else 2.0 if config.loss_type == "simpo" else 0.1
    start, total = 0, torch.zeros((), dtype=torch.float64)
    for pair in pairs:
        scores = []
        for i, row in enumerate(pair.rows):
            targets = torch.tensor([int(t) for t, has_loss in zip(row.ids[1:], row.loss[1:], strict=True) if has_loss])
            log_probs = logits[start : start + len(targets)].double().log_softmax(-1)[range(len(targets)), targets]
            start += len(targets)
            is_simpo = config.loss_type == "simpo"
            scores.append(log_probs.mean() if is_simpo else log_probs.sum() - (pair.reference or (0.0, 0.0))[i])
        margin = scores[0] - scores[1]
        gamma = (1.0 if config.simpo_gamma is None else config.simpo_gamma) if config.loss_type == "simpo" else 0.0
        p_chosen, p_rejected = torch.sigmoid(beta * margin - gamma), torch.sigmoid(gamma - beta * margin)
        total = total - (1 - config.label_smoothing) * p_chosen.log() - config.label_smoothing * p_rejected.log()
    return total


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beta": 0.5, "label_smoothing": 0.1},
        {"loss_type": "simpo"},
        {"loss_type": "simpo", "simpo_gamma": 0.25, "label_smoothing": 0.2},
    ],
    ids=str,
)
def test_losses_and_gradients_match_the_papers(dpo: Configure, options: dict[str, Any]) -> None:
    config = dpo(**options)
    tokenizer = Tokenizer.from_dir(config.model)
    pairs, _ = DpoReader().tokenize(DpoReader().read_examples(config.data[0]), tokenizer, config.seq_len)
    pairs = [Pair(p.chosen, p.rejected, (-3.0 - i, -2.5)) for i, p in enumerate(pairs[:5])]
    torch.manual_seed(0)
    logits = torch.randn(sum(p.trainable_tokens for p in pairs), 320, requires_grad=True)

    def answer(batch: PackedBatch) -> Tensor:
        return logits

    loss, chosen, rejected, better, margin, *_ = Dpo(config).compute_sums(answer, pairs)
    expected = reference_loss(logits, pairs, config)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    (ours,), (theirs,) = (torch.autograd.grad(each, logits) for each in (loss, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)
    assert float(margin) == pytest.approx(float(chosen - rejected), abs=1e-4)
    assert 0 <= float(better) <= len(pairs)


# -- a run -------------------------------------------------------------------------------------------------------------


def run(config: TrainConfig) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Returns the run's metrics, and the method's state in the last checkpoint."""
    events: list[dict[str, Any]] = []
    result = Trainer(config).run(events.append)
    method_file = Path(str(result.checkpoint)) / "method.safetensors"
    return of_type(events, "metrics"), load_file(method_file) if method_file.exists() else {}


@pytest.mark.pairwise(strength=1)
@pytest.mark.parametrize("rank", [None, 4], ids=["full", "lora"])
@pytest.mark.parametrize("recipe", ["delayed", "current", "rowwise", "block", "bf16"])
def test_the_chosen_completion_becomes_more_probable(
    dpo: Configure, fp8_dir: Path, model_dir: Path, recipe: str, rank: int | None
) -> None:
    base = fp8_dir if recipe == "delayed" and rank else model_dir
    more = {"lora_rank": rank, "lr": 1e-2, "amax_history_len": None} if rank else {}
    config = dpo(model=str(base), recipe=recipe, beta=0.5, max_steps=16, **more)
    metrics, method_state = run(config)
    first, last = metrics[0], metrics[-1]
    # The scales of "current" depend on the batch, except with LoRA, whose frozen layers have a scale for each row.
    tolerance = 1.0 if recipe == "current" and not rank else 0.0
    assert abs(first["rewards/margins"]) <= tolerance
    assert first["train_loss"] == pytest.approx(math.log(2), abs=1e-7 + tolerance)
    assert last["train_loss"] < 0.8 * math.log(2)
    assert last["rewards/accuracies"] == 1
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"], abs=1e-4)
    assert method_state["items.reference"].shape == (len(PAIRS), 2)


def test_reference_of_an_adapter_is_its_base_model(dpo: Configure, fp8_dir: Path) -> None:
    config = dpo(model=str(fp8_dir), amax_history_len=None, lora_rank=4, max_steps=1)
    _, method_state = run(config)
    tokenizer = Tokenizer.from_dir(fp8_dir)
    pairs, _ = DpoReader().tokenize(DpoReader().read_examples(config.data[0]), tokenizer, config.seq_len)
    rows = [row for pair in pairs for row in pair.rows]
    logps = log_probs(fp8_dir, [row.ids.tolist() for row in rows])  # those that a server returns
    sums = torch.stack([logp[torch.from_numpy(row.loss[1:])].sum() for logp, row in zip(logps, rows, strict=True)])
    assert torch.equal(method_state["items.reference"].flatten(), sums)


def test_validation_reports_rewards_of_held_out_pairs(dpo: Configure, tmp_path: Path) -> None:
    held_out = write_lines(tmp_path / "held-out.jsonl", PAIRS[:3])
    events: list[dict[str, Any]] = []
    config = dpo(data=[str(write_lines(tmp_path / "more.jsonl", PAIRS[3:]))], eval_data=[str(held_out)], eval_every=4)
    result = Trainer(TrainConfig.from_dict({**vars(config), "on_divergence": "keep"})).run(events.append)
    assert [e["loss"] for e in events if e.get("code") == "validated"] == [pytest.approx(math.log(2))]
    validations = [e for e in of_type(events, "metrics") if "valid_loss" in e]
    assert [e["step"] for e in validations] == [4, 8]
    assert 0 <= validations[-1]["valid_rewards/accuracies"] <= 1
    margin = validations[-1]["valid_rewards/chosen"] - validations[-1]["valid_rewards/rejected"]
    assert validations[-1]["valid_rewards/margins"] == pytest.approx(margin, abs=1e-4)
    assert "reward accuracy=" in validations[-1]["message"]
    method_state = load_file(Path(str(result.checkpoint)) / "method.safetensors")
    assert method_state["eval_items.reference"].shape == (3, 2)


def test_simpo_stores_no_reference_scores(dpo: Configure) -> None:
    metrics, method_state = run(dpo(loss_type="simpo"))
    assert method_state == {}
    assert metrics[0]["rewards/margins"] != 0
    assert metrics[-1]["train_loss"] < metrics[0]["train_loss"]


def test_resuming_with_other_validation_pairs_is_refused(dpo: Configure, tmp_path: Path) -> None:
    first, second = (write_lines(tmp_path / f"{i}.jsonl", PAIRS[i : i + 3]) for i in (3, 6))
    Trainer(dpo(max_steps=2, eval_data=[str(first)], on_divergence="keep")).run()
    with pytest.raises(JobError, match="reference scores of other pairs than those of data and eval_data"):
        Trainer(dpo(max_steps=3, eval_data=[str(second)], on_divergence="keep")).run()
    assert Trainer(dpo(max_steps=3)).run().step == 3


def test_a_killed_and_resumed_run_writes_the_same_files(tmp_path: Path, dpo: Configure) -> None:
    names = ("model/scales.safetensors", "checkpoints/step-6/method.safetensors", "checkpoints/step-6/manifest.json")
    assert_same_when_killed(tmp_path, dpo, names, max_steps=6)


# -- data --------------------------------------------------------------------------------------------------------------

USER, YES, NO = (
    {"role": "user", "content": "red or blue?"},
    {"role": "assistant", "content": "blue"},
    {"role": "assistant", "content": "red"},
)


@pytest.mark.parametrize(
    ("row", "same"),
    [
        (
            {"prompt": [USER], "chosen": [YES], "rejected": [NO]},
            [
                {"chosen": [USER, YES], "rejected": [USER, NO]},
                {"prompt": "red or blue?", "chosen": [USER, YES], "rejected": [USER, NO]},
                {"chosen": json.dumps([USER, YES]), "rejected": json.dumps([USER, NO])},
                {"input": {"messages": [USER]}, "preferred_output": [YES], "non_preferred_output": [NO]},
            ],
        ),
        (
            {"prompt": "the sky is", "chosen": " blue", "rejected": " black"},
            [{"chosen": "the sky is blue", "rejected": "the sky is black"}],
        ),
    ],
    ids=["chat", "text"],
)
def test_a_pair_is_the_same_in_every_data_format(
    model_dir: Path, row: dict[str, Any], same: list[dict[str, Any]]
) -> None:
    tokenizer = Tokenizer.from_dir(model_dir)

    def pair(row: dict[str, Any]) -> Pair:
        ((pair,), _) = DpoReader().tokenize([DpoReader().parse_row(row, "x:1")], tokenizer, 64)
        return pair

    expected = pair(row)
    texts = [tokenizer.decode(r.ids[r.loss].tolist()).strip() for r in expected.rows]
    assert texts == (["blue", "red"] if "input" in same[-1] else ["blue", "black"])
    for other in map(pair, same):
        for ours, theirs in zip(expected.rows, other.rows, strict=True):
            assert ours.ids.tolist() == theirs.ids.tolist()
            assert ours.loss.tolist() == theirs.loss.tolist()


def test_an_earlier_turn_of_the_assistant_is_context(model_dir: Path) -> None:
    row = {"prompt": [USER, NO, USER], "chosen": [YES], "rejected": [NO]}
    ((pair,), _) = DpoReader().tokenize([DpoReader().parse_row(row, "x:1")], Tokenizer.from_dir(model_dir), 64)
    texts = [Tokenizer.from_dir(model_dir).decode(r.ids[r.loss].tolist()) for r in pair.rows]
    assert texts == ["blue", "red"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "a"}, "x:1 has only ['chosen']; give `chosen` and `rejected`"),
        ({"text": "a"}, "x:1 has only ['text']; give `chosen` and `rejected`"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, "x:1: `rejected` is empty."),
        ({"prompt": "a", "chosen": "b", "rejected": [NO]}, "one of `chosen` and `rejected` is text and the other is"),
        (
            {"prompt": [USER], "chosen": "b", "rejected": "c"},
            "`prompt` is a conversation, but `chosen` and `rejected` are text",
        ),
        ({"prompt": [USER], "chosen": [], "rejected": [NO]}, "x:1: `chosen` is [], which is neither text nor a list"),
        (
            {"prompt": [USER], "chosen": '[{"role": "assistant", "content": "a", "content": "b"}]', "rejected": [NO]},
            "x:1: `chosen` is text that is not valid JSON: the key 'content' appears twice.",
        ),
        ({"prompt": [USER], "chosen": [USER], "rejected": [NO]}, "x:1, `chosen`: no message is the assistant's"),
        ({"prompt": [USER], "chosen": [{"role": "x"}], "rejected": [NO]}, "x:1, `chosen`: message 1 has the"),
        ({"preferred_output": [YES], "non_preferred_output": [NO]}, "x:1: `input` is not an object with a list of"),
        ({"input": {"messages": [USER]}, "preferred_output": [YES]}, "x:1 has only ['input', 'preferred_output']"),
        ('{"chosen": "a",', "x:1 is not valid JSON"),
        ("[1]", "x:1 is a list where an object was expected"),
    ],
)
def test_the_error_of_a_bad_row_is_one_sentence_that_names_its_line(row: Any, message: str) -> None:
    with pytest.raises(DataError) as caught:
        DpoReader().parse_row(row, "x:1")
    assert message in str(caught.value)


def test_a_dry_run_lists_bad_rows_and_counts_dropped_ones(dpo: Configure, tmp_path: Path) -> None:
    rows: list[Any] = [*PAIRS[:2], {"text": "a"}, {"prompt": "a", "chosen": "b", "rejected": "b"}]
    report = validate(dpo(data=[str(write_lines(tmp_path / "d.jsonl", rows))]))
    assert [bad["line"] for bad in report.bad_lines] == [3]
    assert (report.data.rows, report.data.dropped_rows) == (2, 1)
    pieces = [text for text, has_loss in report.sample if has_loss]
    assert pieces == [f"{PAIRS[0][name]}<|end|>" for name in ("chosen", "rejected")]
    prose = tmp_path / "prose.txt"
    prose.write_text("Nobody prefers this.")
    (bad,) = validate(dpo(data=[str(prose)])).bad_lines
    assert "is prose, which holds no pairs" in bad["message"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": "sft", "beta": 0.1}, "beta is an option of the method dpo or grpo; give method dpo or grpo, too"),
        ({"method": "sft", "simpo_gamma": 0.5}, "simpo_gamma is an option of the method dpo"),
        ({"method": "ppo"}, "method must be 'sft', 'dpo' or 'grpo'"),
        ({"simpo_gamma": 0.5}, "simpo_gamma belongs to the loss simpo, not to sigmoid"),
        ({"loss_type": "dapo"}, "loss_type dapo is no loss of the method dpo; give sigmoid, simpo"),
        ({"beta": 0.0}, "beta must be greater than 0"),
    ],
)
def test_options_that_would_be_ignored_are_refused(dpo: Configure, values: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as caught:
        dpo(**values)
    assert message in str(caught.value)


def test_resuming_with_another_beta_is_refused(dpo: Configure) -> None:
    Trainer(dpo(max_steps=2)).run()
    with pytest.raises(JobError, match=r"written with beta=None, and this job has 0\.3"):
        Trainer(dpo(max_steps=3, beta=0.3)).run()


def test_pairs_with_equal_completions_are_reported(dpo: Configure, tmp_path: Path) -> None:
    same, pair = {"prompt": "a", "chosen": "b c", "rejected": "b c"}, {"prompt": "a", "chosen": "b", "rejected": "c"}
    data = write_lines(tmp_path / "same.jsonl", [same, same])
    with pytest.raises(DataError, match=r"None of the 2 examples in .* has two different completions within seq_len"):
        Trainer(dpo(data=[str(data)], max_steps=1)).run()
    events: list[Any] = []
    write_lines(data, [same, pair])
    Trainer(dpo(data=[str(data)], max_steps=1)).run(events.append)
    messages = [e["message"] for e in events if e.get("code") == "rows_dropped"]
    assert messages == ["1 examples do not have two different completions within seq_len and were dropped"]
