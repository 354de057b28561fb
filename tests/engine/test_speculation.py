"""Speculative decoding: drafts, right or wrong, change no bit of an answer and not where it ends."""

import random
import re
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fp8serve.cli import main
from fp8serve.engine import engine as engine_module
from fp8serve.engine.engine import Engine
from fp8serve.engine.output import RequestOutput
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import RequestError

from .test_independence import MODES, comparable_fields, engine, large_dir, request, run  # noqa: F401  # a fixture
from .tiny import EOS

PROMPT = [256, *b"Once upon a time"]
TIGHT: dict[str, Any] = {"num_blocks": 15, "max_num_seqs": 5, "max_batch_tokens": 19, "max_prefill_tokens": 7}


class ScriptedDrafter:
    """A drafter that proposes tokens of the list `answers`; each token is wrong with the probability `wrong`."""

    answers: ClassVar[list[list[int]]] = []
    wrong: ClassVar[float] = 0.0

    def __init__(self, most: int) -> None:
        self._most, self._rng = most, random.Random(most)

    def propose(self, token_ids: Items[int], room: int, rows: int) -> list[int]:
        script = next(
            (answer for answer in self.answers if answer[: len(token_ids)] == token_ids), [*token_ids, *[9] * 99]
        )
        tokens = script[len(token_ids) :][: min(self._most, room)]
        return [(token + 1) % 256 if self._rng.random() < self.wrong else token for token in tokens]

    def record(self, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted


@pytest.fixture
def drafter(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedDrafter]:
    monkeypatch.setattr(engine_module, "Drafter", ScriptedDrafter)
    monkeypatch.setattr(ScriptedDrafter, "answers", [])
    monkeypatch.setattr(ScriptedDrafter, "wrong", 0.0)
    return ScriptedDrafter


def add_script(drafter: type[ScriptedDrafter], request: Request, outputs: Items[Any]) -> None:
    drafter.answers.append([*request.prompt_token_ids, *(token for output in outputs for token in output[0])])


@pytest.mark.parametrize("mode", list(MODES))
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), wrong=st.sampled_from([0.0, 0.3, 1.0]))
def test_drafts_change_no_bit(
    large_dir: Path,  # noqa: F811
    mode: str,
    drafter: type[ScriptedDrafter],
    seed: int,
    wrong: float,
) -> None:
    """The cache and the batch are too small for all requests, and all of them are drafted."""
    rng = random.Random(seed)
    requests = [replace_new(request(rng, f"mine {i}"), rng.randint(1, 16)) for i in range(4)]
    drafter.wrong, drafter.answers = wrong, []
    expected: dict[str, list[Any]] = {}
    for each in requests:
        expected |= run(engine(large_dir, mode), [each], random.Random(0))
        add_script(drafter, each, expected[each.request_id])
    crowded = engine(large_dir, mode, **TIGHT, speculative_tokens=rng.choice((1, 3, 7)))
    assert run(crowded, requests, rng) == expected


def replace_new(request: Request, new: int) -> Request:
    return replace(request, params=replace(request.params, max_new_tokens=new))


def test_tight_schedules_preempt_share_accept_and_reject(
    large_dir: Path,  # noqa: F811
    drafter: type[ScriptedDrafter],
) -> None:
    crowded, rng = engine(large_dir, "bf16", **TIGHT, speculative_tokens=6), random.Random(0)
    drafter.wrong = 0.2
    for batch in range(8):
        requests = [replace_new(request(rng, f"{batch} {i}"), 12) for i in range(7)]
        for each in requests:
            add_script(drafter, each, run(engine(large_dir, "bf16"), [each], random.Random(0))[each.request_id])
        run(crowded, requests, rng)
    stats = crowded.stats()
    assert stats["preemptions_total"] > 0
    assert stats["prefix_hit_tokens_total"] > 0
    assert 0 < stats["accepted_draft_tokens_total"] < stats["draft_tokens_total"]
    assert stats["kv_blocks_used"] == 0


@pytest.fixture(scope="module")
def plain(model_dir: Path) -> Engine:
    return Engine(model_dir, recipe="bf16", block_size=4, max_num_seqs=4)


@pytest.fixture(scope="module")
def drafting(model_dir: Path) -> Engine:
    return Engine(model_dir, recipe="bf16", block_size=4, max_num_seqs=4, speculative_tokens=8)


def outputs(engine: Engine, **sampling: Any) -> list[RequestOutput]:
    params = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True, "seed": 1, **sampling}
    engine.add_request(Request("r", tuple(PROMPT), SamplingParams(**params)))
    results: list[RequestOutput] = []
    while engine.has_work():
        results += engine.step()
    return [replace(output, num_cached_tokens=0) for output in results]


def steps(engine: Engine, **sampling: Any) -> tuple[list[RequestOutput], int]:
    before = engine.stats()["steps_total"]
    return outputs(engine, **sampling), engine.stats()["steps_total"] - before


def script_drafter(drafter: type[ScriptedDrafter], plain: Engine, wrong: float = 0.0, **sampling: Any) -> None:
    drafter.answers = [PROMPT + [token for output in outputs(plain, **sampling) for token in output.token_ids]]
    drafter.wrong = wrong


def test_right_drafts_save_steps(plain: Engine, drafting: Engine, drafter: type[ScriptedDrafter]) -> None:
    script_drafter(drafter, plain)
    actual, num_steps = steps(drafting)
    assert actual == outputs(plain)
    assert num_steps == 1 + -(-39 // 9)  # one for the prompt and the first token, then nine at a time


def test_wrong_drafts_save_no_steps(plain: Engine, drafting: Engine, drafter: type[ScriptedDrafter]) -> None:
    script_drafter(drafter, plain, wrong=1.0)
    actual, num_steps = steps(drafting)
    assert (actual, num_steps) == (outputs(plain), 40)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "top_p": 0.9, "logprobs": 3},
        {"temperature": 1.5, "frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.3},
        {"min_tokens": 13, "ignore_eos": False},
        {"max_new_tokens": 1},
        {"max_new_tokens": 2},
        {"prompt_logprobs": 1, "logprobs": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("wrong", [0.0, 0.25])
def test_drafts_change_no_bit_with_any_sampling_options(
    plain: Engine, drafting: Engine, drafter: type[ScriptedDrafter], sampling: dict[str, Any], wrong: float
) -> None:
    script_drafter(drafter, plain, wrong, **sampling)
    assert outputs(drafting, **sampling) == outputs(plain, **sampling)


def test_answers_may_end_in_the_middle_of_a_draft(
    plain: Engine, drafting: Engine, drafter: type[ScriptedDrafter]
) -> None:
    """They end at a stop token, an end-of-text token or a stop string, although later tokens of the draft are right."""
    script_drafter(drafter, plain)
    whole = drafter.answers[0][len(PROMPT) :]
    for at in range(3, 12):
        assert outputs(drafting, stop_token_ids=(whole[at],)) == outputs(plain, stop_token_ids=(whole[at],))
        text = plain.tokenizer.decode(whole[at : at + 2]) if plain.tokenizer else ""
        assert outputs(drafting, stop=(text,)) == outputs(plain, stop=(text,))
    for each in (plain, drafting):
        each.eos_ids = (whole[6],)
    try:
        ended = outputs(drafting, ignore_eos=False)
        assert ended == outputs(plain, ignore_eos=False)
        assert ended[-1].finish_reason == "stop"
    finally:
        plain.eos_ids = drafting.eos_ids = (EOS,)


def test_rejected_draft_tokens_are_never_shared_as_a_prefix(
    plain: Engine, drafting: Engine, drafter: type[ScriptedDrafter]
) -> None:
    """A later prompt that continues like a wrong draft finds only the tokens that both have in common."""
    prompt = PROMPT[:8]
    drafter.answers = [prompt + [7] * 99]
    drafting.generate([prompt], max_new_tokens=24, temperature=0.0, ignore_eos=True)
    for count in (4, 8, 12):
        later, new = prompt + [7] * count, {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True, "logprobs": 2}
        assert drafting.generate([later], **new) == plain.generate([later], **new)


def test_accepted_draft_tokens_are_shared_as_a_prefix(
    model_dir: Path, plain: Engine, drafter: type[ScriptedDrafter]
) -> None:
    script_drafter(drafter, plain)
    fresh = Engine(model_dir, recipe="bf16", block_size=4, max_num_seqs=4, speculative_tokens=8)
    outputs(fresh)
    before = fresh.stats()["prefix_hit_tokens_total"]
    script = drafter.answers[0]
    fresh.generate([script], max_new_tokens=1)
    assert fresh.stats()["prefix_hit_tokens_total"] - before == (len(script) - 1) // 4 * 4


def test_an_answer_may_fill_the_context(plain: Engine, drafting: Engine, drafter: type[ScriptedDrafter]) -> None:
    new = plain.limits.max_model_len - len(PROMPT)
    script_drafter(drafter, plain, max_new_tokens=new)
    actual = outputs(drafting, max_new_tokens=new)
    assert actual == outputs(plain, max_new_tokens=new)
    assert actual[-1].num_generated == new


def test_drafts_need_no_more_cache_than_plain_decoding(
    model_dir: Path, plain: Engine, drafter: type[ScriptedDrafter]
) -> None:
    """Drafts allocate no block that plain decoding would not."""
    new = 56 - len(PROMPT)
    script_drafter(drafter, plain)
    small = Engine(model_dir, recipe="bf16", block_size=4, num_blocks=14, speculative_tokens=8)
    assert outputs(small, max_new_tokens=new) == outputs(plain, max_new_tokens=new)
    assert small.stats()["preemptions_total"] == 0


def test_answers_with_a_grammar_are_not_drafted(
    drafting: Engine, plain: Engine, drafter: type[ScriptedDrafter]
) -> None:
    drafter.answers = [PROMPT + [7] * 99]
    before = drafting.stats()["drafts_total"]
    form: dict[str, Any] = {"regex": "(ab)+c", "max_new_tokens": 20, "ignore_eos": False}
    assert outputs(drafting, **form) == outputs(plain, **form)
    assert drafting.stats()["drafts_total"] == before


def test_answers_with_bad_words_are_not_drafted(
    drafting: Engine, plain: Engine, drafter: type[ScriptedDrafter]
) -> None:
    """The tokens that would complete a bad word depend on the previous token."""
    expected = outputs(plain)
    bad_word = "".join(output.text_delta for output in expected)[3:5]
    without = outputs(plain, bad_words=(bad_word,))
    assert without != expected
    script_drafter(drafter, plain)
    before = drafting.stats()["drafts_total"]
    assert outputs(drafting, bad_words=(bad_word,)) == without
    assert drafting.stats()["drafts_total"] == before


def test_prompt_lookup_changes_no_bit_of_several_answers_to_one_prompt(plain: Engine, drafting: Engine) -> None:
    """The drafter is the real one, and the prompt repeats itself."""
    prompt = [256, *b"to be or not to be or not to be or not to "]
    sampling: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.7, "seed": 5, "ignore_eos": True, "logprobs": 1}
    assert drafting.generate([prompt] * 6, **sampling) == plain.generate([prompt] * 6, **sampling)


def test_a_text_that_repeats_itself_takes_fewer_steps(model_dir: Path, plain: Engine) -> None:
    """A small model at temperature 0 soon repeats itself."""
    sampling: dict[str, Any] = {"max_new_tokens": 100}
    fresh = Engine(model_dir, recipe="bf16", block_size=4, speculative_tokens=8)
    actual, steps_with_drafts = steps(fresh, **sampling)
    expected, steps_without = steps(plain, **sampling)
    assert actual == expected
    assert steps_with_drafts < steps_without
    stats = fresh.stats()
    assert stats["generated_tokens_total"] == 100 == steps_with_drafts + stats["accepted_draft_tokens_total"]


def test_generate_command_reports_accepted_drafts(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(model_dir), "--recipe", "bf16", "--ignore-eos", "to be or not to be"]
    assert main(command) == 0
    expected = capsys.readouterr()
    assert main([*command, "--speculative-tokens", "4"]) == 0
    actual = capsys.readouterr()
    assert actual.out == expected.out
    assert re.search(r"speculation: \d+ of \d+ draft tokens .* 64 tokens in \d+ steps", actual.err)
    assert "speculation" not in expected.err


def test_invalid_speculative_tokens_are_refused(model_dir: Path) -> None:
    for wrong in (-1, 65, 1.5, "many"):
        with pytest.raises(RequestError, match="speculative_tokens"):
            Engine(model_dir, recipe="bf16", speculative_tokens=wrong)
