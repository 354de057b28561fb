"""A draft model, right or wrong, changes no bit of an answer, and its KV cache uses the block table of the sequence."""

import logging
import random
import re
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from fp8serve.cli import main
from fp8serve.engine import draft_model
from fp8serve.engine.drafting import ALLOWANCE
from fp8serve.engine.engine import Engine
from fp8serve.engine.request import Request
from fp8serve.errors import MachineError, ModelError

from .adapters import write_random_adapter
from .drafts import LAYERS, rewrite, write_drafts
from .test_independence import LONGEST_PROMPT, request, run
from .tiny import BOS, VOCAB, write_model, write_scales

PROMPT = [BOS, *b"Once upon a time there was"]
PROMPTS = [PROMPT, [BOS, *b"Hallo"], [*PROMPT, *b" a king"], [7] * 9]
BLOCK_SIZE = 4
TIGHT: dict[str, Any] = {"num_blocks": 15, "max_num_seqs": 5, "max_batch_tokens": 19, "max_prefill_tokens": 7}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = write_drafts(tmp_path_factory.mktemp("drafts"))
    write_scales(home / "model", home / "made-up", kv=False)
    return home


@cache
def shared_engine(home: Path, draft: str | None, **options: Any) -> Engine:
    return new_engine(home, draft, **options)


def new_engine(home: Path, draft: str | None, **options: Any) -> Engine:
    chosen = {"recipe": "bf16", "block_size": BLOCK_SIZE, **options}
    return Engine(home / "model", **chosen, draft_model=None if draft is None else str(home / draft))


def sampling(**changes: Any) -> dict[str, Any]:
    return {"max_new_tokens": 40, "temperature": 0.0, "seed": 3, "ignore_eos": True, "logprobs": 2, **changes}


def generate_and_count(shared_engine: Engine, prompts: Items[Any], **changes: Any) -> tuple[Any, dict[str, int]]:
    """Returns the answers, and how much each counter of the engine rose."""
    before = shared_engine.stats()
    answers, after = shared_engine.generate(prompts, **sampling(**changes)), shared_engine.stats()
    return answers, {name: after[name] - before[name] for name in after if name.endswith("_total") and name[0] != "f"}


@pytest.mark.parametrize("recipe", ["bf16", "rowwise"])
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), draft=st.sampled_from(["same", "other"]), most=st.sampled_from([1, 4, 7]))
def test_a_draft_model_changes_no_bit(home: Path, recipe: str, seed: int, draft: str, most: int) -> None:
    """The cache and the batch are too small for all requests, so that there are chunks, preemptions, shared prefixes
    and aborts."""
    rng = random.Random(seed)
    most_new = TIGHT["num_blocks"] * BLOCK_SIZE - LONGEST_PROMPT  # so that the cache holds any one sequence
    mine = [with_new_tokens(request(rng, f"mine {i}"), rng.randint(1, most_new)) for i in range(3)]
    noise = [with_new_tokens(request(rng, f"noise {i}"), 12) for i in range(3)]
    expected: dict[str, list[Any]] = {}
    for each in mine:
        expected |= run(shared_engine(home, None, recipe=recipe), [each], random.Random(0))
    crowded = shared_engine(home, draft, recipe=recipe, **TIGHT, speculative_tokens=most)
    actual = run(crowded, [*mine, *noise], rng)
    assert {name: actual[name] for name in expected} == expected
    assert crowded.stats()["kv_blocks_used"] == 0


def with_new_tokens(request: Request, new: int) -> Request:
    return replace(request, params=replace(request.params, max_new_tokens=new))


def test_tight_schedules_preempt_share_accept_and_reject(home: Path) -> None:
    totals: dict[str, int] = {}
    for draft in ("same", "other"):
        crowded, rng = new_engine(home, draft, **TIGHT), random.Random(0)
        for batch in range(4):
            run(crowded, [with_new_tokens(request(rng, f"{batch} {i}"), 16) for i in range(7)], rng)
        stats = crowded.stats()
        totals |= {f"{draft} {name}": stats[f"{name}_total"] for name in ("draft_tokens", "accepted_draft_tokens")}
        assert stats["preemptions_total"] > 0
        assert stats["prefix_hit_tokens_total"] > 0
    assert totals["same draft_tokens"] == totals["same accepted_draft_tokens"] > 50
    assert totals["other draft_tokens"] > totals["other accepted_draft_tokens"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_accepted_drafts_save_steps(home: Path, temperature: float) -> None:
    expected, _ = generate_and_count(shared_engine(home, None), [PROMPT], temperature=temperature)
    actual, totals = generate_and_count(new_engine(home, "same"), [PROMPT], temperature=temperature)
    assert actual == expected
    assert totals["draft_tokens_total"] == totals["accepted_draft_tokens_total"] == 40 - totals["steps_total"]
    assert totals["steps_total"] <= 12  # one for the prompt; five tokens a step once the draft budget suffices
    # the draft model computes every token of prompt and answer at most once
    assert totals["draft_model_tokens_total"] <= len(PROMPT) + 40


def test_drafting_stops_if_drafts_are_rejected(home: Path) -> None:
    for batch in range(3):
        wrong = shared_engine(home, "other", max_num_seqs=4)
        actual, _ = generate_and_count(wrong, PROMPTS, max_new_tokens=60, temperature=float(batch > 0))
        assert (
            actual
            == generate_and_count(shared_engine(home, None), PROMPTS, max_new_tokens=60, temperature=float(batch > 0))[
                0
            ]
        )
    stats, parts = wrong.stats(), wrong.loaded.draft
    assert parts is not None
    assert stats["accepted_draft_tokens_total"] < stats["draft_tokens_total"] / 4
    spent = stats["draft_model_tokens_total"] * parts.cost * draft_model.ROW_COST + stats["draft_tokens_total"] * 0.08
    earned = stats["accepted_draft_tokens_total"] + ALLOWANCE * stats["computed_tokens_total"]
    assert 0 < spent < draft_model.START_STEPS + earned + 1


def test_a_cached_prefix_includes_the_draft_models_cache(home: Path) -> None:
    drafting = new_engine(home, "same")
    first, first_totals = generate_and_count(drafting, [PROMPT], max_new_tokens=8)
    second, totals = generate_and_count(drafting, [PROMPT], max_new_tokens=8)
    assert second == first
    assert first_totals["draft_model_tokens_total"] > len(PROMPT)
    assert totals["draft_model_tokens_total"] < first_totals["draft_model_tokens_total"] - len(PROMPT) // 4 * 4 + 4


def test_adapters_are_drafted_and_answers_with_grammar_or_bad_words_are_not(home: Path, tmp_path: Path) -> None:
    """The draft model runs without the adapter."""
    adapter = write_random_adapter(tmp_path / "a", home / "model", rank=4, seed=1)
    plain, drafting = new_engine(home, None), new_engine(home, "same")
    for each in (plain, drafting):
        each.load_adapter("a", adapter)
    for name in ("a", None):
        answers = [each.generate(PROMPTS, adapter=name, **sampling()) for each in (plain, drafting)]
        assert answers[0] == answers[1]
    for options in ({"regex": "(ab)+c", "ignore_eos": False}, {"bad_words": ("e",)}):
        actual, totals = generate_and_count(drafting, [PROMPT], **options)
        assert actual == generate_and_count(plain, [PROMPT], **options)[0]
        assert totals["drafts_total"] == 0


def test_an_answer_continues_beyond_the_draft_models_context(home: Path) -> None:
    write_model(home / "short", num_hidden_layers=1, max_position_embeddings=48)
    rewrite(home / "short", load_file(home / "same" / "model.safetensors"))
    actual, totals = generate_and_count(new_engine(home, "short"), [PROMPT], max_new_tokens=90)
    assert actual == generate_and_count(shared_engine(home, None), [PROMPT], max_new_tokens=90)[0]
    assert 0 < totals["draft_tokens_total"] <= 48 - len(PROMPT)


@pytest.mark.parametrize("size", [VOCAB - 2, VOCAB + 6])
def test_a_draft_models_vocabulary_may_have_other_padding(home: Path, size: int) -> None:
    """The embedding of the draft model has more or fewer unused rows."""
    name = f"padded {size}"
    write_model(home / name, num_hidden_layers=1, vocab_size=size)
    tensors = load_file(home / "same" / "model.safetensors")
    rows = tensors["model.embed_tokens.weight"]
    tensors["model.embed_tokens.weight"] = torch.cat([rows, torch.ones(6, rows.shape[1]).bfloat16()])[:size]
    rewrite(home / name, tensors)
    drafting = new_engine(home, name)
    for prompt in (PROMPT, [VOCAB - 1, *PROMPT]):
        actual, totals = generate_and_count(drafting, [prompt])
        assert actual == generate_and_count(shared_engine(home, None), [prompt])[0]
        assert (totals["draft_tokens_total"] > 0) == (size > VOCAB or max(prompt) < size)


def test_a_failing_draft_model_changes_no_answer(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(home / "damaged", num_hidden_layers=1)
    tensors = load_file(home / "same" / "model.safetensors")
    rewrite(home / "damaged", tensors | {"model.norm.weight": torch.full((64,), torch.nan).bfloat16()})
    expected = generate_and_count(shared_engine(home, None), [PROMPT])[0]
    actual, totals = generate_and_count(new_engine(home, "damaged"), [PROMPT])
    assert (actual, totals["draft_tokens_total"]) == (expected, 0)

    failing = new_engine(home, "same")
    assert failing.loaded.draft is not None
    monkeypatch.setattr(failing.loaded.draft.runner, "run", fail)
    with caplog.at_level(logging.WARNING):
        assert generate_and_count(failing, [PROMPT])[0] == expected
    assert [record.getMessage() for record in caplog.records if "same failed" in record.getMessage()] != []


def fail(work: object) -> Tensor:
    raise RuntimeError("out of memory")


def test_the_draft_models_cache_counts_against_kv_cache_bytes(home: Path) -> None:
    alone, with_draft = (new_engine(home, draft, kv_cache_bytes=200_000).info() for draft in (None, "same"))
    assert with_draft["num_blocks"] == 200_000 // (
        alone["kv_cache_bytes"] // alone["num_blocks"] * (LAYERS + 1) // LAYERS
    )
    assert with_draft["kv_cache_bytes"] <= 200_000
    assert alone["draft_model"] is None
    assert with_draft["draft_model"].keys() == {"name", "layers", "weight_bytes", "step_cost"}
    with pytest.raises(MachineError, match="lower num_blocks"):
        new_engine(home, "same", kv_cache_bytes=200_000, num_blocks=alone["num_blocks"])


def test_unusable_draft_models_are_refused(home: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path / "wide", vocab_size=VOCAB + 40)
    (tmp_path / "wide" / "tokenizer.json").unlink()
    words = write_model(tmp_path / "words") / "tokenizer.json"
    words.write_text(words.read_text().replace('"</s>"', '"<end>"'))
    embeds = write_model(tmp_path / "embeds", "qwen3")
    (embeds / "modules.json").write_text('[{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]')
    (embeds / "config.json").write_text((embeds / "config.json").read_text().replace("Qwen3ForCausalLM", "Qwen3Model"))
    for directory, sentence in (
        (tmp_path / "nowhere", "draft model cannot be used: .*nowhere does not exist"),
        (tmp_path, "draft model cannot be used: .* holds no config.json"),
        (tmp_path / "wide", f"has {VOCAB + 40} tokens and .* has {VOCAB}; a draft model must have the same vocabulary"),
        (tmp_path / "words", "has another vocabulary than .*: only one of them has the token '.*' with id 257"),
        (embeds, "draft model cannot be used: .* and not to write text"),
    ):
        with pytest.raises(ModelError, match=sentence):
            new_engine(home, str(directory))
    with caplog.at_level(logging.WARNING):
        assert (
            new_engine(home, "model").generate([PROMPT], **sampling())
            == generate_and_count(shared_engine(home, None), [PROMPT])[0]
        )
    assert "too much for drafts to save time" in caplog.text


def test_generate_command_reports_accepted_drafts(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(home / "model"), "--recipe", "bf16", "--ignore-eos", "to be or not to be"]
    assert main(command) == 0
    expected = capsys.readouterr()
    assert main([*command, "--draft-model", str(home / "same")]) == 0
    actual = capsys.readouterr()
    assert actual.out == expected.out
    assert re.search(r"speculation: (\d+) of \1 draft tokens .* 64 tokens in \d\d steps", actual.err)
    assert main([*command, "--draft-model", str(home / "nowhere")]) == 1
    assert "nowhere is not a directory" in capsys.readouterr().err
