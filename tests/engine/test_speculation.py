"""With drafts, right or wrong, an answer has every bit that it has without them, and ends where it would."""

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

from .test_independence import MODES, engine, essence, large_dir, request, run  # noqa: F401  # a fixture
from .tiny import EOS

PROMPT = [256, *b"Once upon a time"]
TIGHT: dict[str, Any] = {"num_blocks": 15, "max_num_seqs": 5, "max_batch_tokens": 19, "max_prefill_tokens": 7}


class Informed:
    """Drafts from answers that it was told; each token is wrong with the probability `wrong`."""

    known: ClassVar[list[list[int]]] = []
    wrong: ClassVar[float] = 0.0

    def __init__(self, most: int) -> None:
        self._most, self._rng = most, random.Random(most)

    def propose(self, token_ids: Items[int], room: int, rows: int) -> list[int]:
        told = next((known for known in self.known if known[: len(token_ids)] == token_ids), [*token_ids, *[9] * 99])
        found = told[len(token_ids) :][: min(self._most, room)]
        return [(token + 1) % 256 if self._rng.random() < self.wrong else token for token in found]

    def record(self, drafted: int, accepted: int) -> None:
        assert 0 <= accepted <= drafted


@pytest.fixture
def informed(monkeypatch: pytest.MonkeyPatch) -> type[Informed]:
    monkeypatch.setattr(engine_module, "Drafter", Informed)
    monkeypatch.setattr(Informed, "known", [])
    monkeypatch.setattr(Informed, "wrong", 0.0)
    return Informed


def tell(informed: type[Informed], request: Request, outputs: Items[Any]) -> None:
    informed.known.append([*request.prompt_token_ids, *(token for output in outputs for token in output[0])])


@pytest.mark.parametrize("mode", list(MODES))
@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), wrong=st.sampled_from([0.0, 0.3, 1.0]))
def test_drafts_change_no_bit(
    large_dir: Path,  # noqa: F811
    mode: str,
    informed: type[Informed],
    seed: int,
    wrong: float,
) -> None:
    """Among others, in a cache and a batch that are too small, all of them with drafts."""
    rng = random.Random(seed)
    requests = [replace_new(request(rng, f"mine {i}"), rng.randint(1, 16)) for i in range(4)]
    informed.wrong, informed.known = wrong, []
    expected: dict[str, list[Any]] = {}
    for each in requests:
        expected |= run(engine(large_dir, mode), [each], random.Random(0))
        tell(informed, each, expected[each.request_id])
    crowded = engine(large_dir, mode, **TIGHT, speculative_tokens=rng.choice((1, 3, 7)))
    assert run(crowded, requests, rng) == expected


def replace_new(request: Request, new: int) -> Request:
    return replace(request, params=replace(request.params, max_new_tokens=new))


def test_these_schedules_preempt_share_accept_and_reject(
    large_dir: Path,  # noqa: F811
    informed: type[Informed],
) -> None:
    crowded, rng = engine(large_dir, "bf16", **TIGHT, speculative_tokens=6), random.Random(0)
    informed.wrong = 0.2
    for batch in range(8):
        requests = [replace_new(request(rng, f"{batch} {i}"), 12) for i in range(7)]
        for each in requests:
            tell(informed, each, run(engine(large_dir, "bf16"), [each], random.Random(0))[each.request_id])
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
    found: list[RequestOutput] = []
    while engine.has_work():
        found += engine.step()
    return [replace(output, num_cached_tokens=0) for output in found]


def steps(engine: Engine, **sampling: Any) -> tuple[list[RequestOutput], int]:
    before = engine.stats()["steps_total"]
    return outputs(engine, **sampling), engine.stats()["steps_total"] - before


def inform(informed: type[Informed], plain: Engine, wrong: float = 0.0, **sampling: Any) -> None:
    informed.known = [PROMPT + [token for output in outputs(plain, **sampling) for token in output.token_ids]]
    informed.wrong = wrong


def test_right_drafts_save_their_steps(plain: Engine, drafting: Engine, informed: type[Informed]) -> None:
    inform(informed, plain)
    found, taken = steps(drafting)
    assert found == outputs(plain)
    assert taken == 1 + -(-39 // 9)  # one for the prompt and the first token, then nine at a time


def test_wrong_drafts_save_none(plain: Engine, drafting: Engine, informed: type[Informed]) -> None:
    inform(informed, plain, wrong=1.0)
    found, taken = steps(drafting)
    assert (found, taken) == (outputs(plain), 40)


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
def test_every_way_to_sample(
    plain: Engine, drafting: Engine, informed: type[Informed], sampling: dict[str, Any], wrong: float
) -> None:
    inform(informed, plain, wrong, **sampling)
    assert outputs(drafting, **sampling) == outputs(plain, **sampling)


def test_answers_end_in_the_middle_of_a_draft(plain: Engine, drafting: Engine, informed: type[Informed]) -> None:
    """At a stop token, at the end of text, and at a stop string, however much of the draft would have been right."""
    inform(informed, plain)
    whole = informed.known[0][len(PROMPT) :]
    for at in range(3, 12):
        assert outputs(drafting, stop_token_ids=(whole[at],)) == outputs(plain, stop_token_ids=(whole[at],))
        text = plain.tokenizer.decode(whole[at : at + 2]) if plain.tokenizer else ""
        assert outputs(drafting, stop=(text,)) == outputs(plain, stop=(text,))
    for one in (plain, drafting):
        one.eos_ids = (whole[6],)
    try:
        ended = outputs(drafting, ignore_eos=False)
        assert ended == outputs(plain, ignore_eos=False)
        assert ended[-1].finish_reason == "stop"
    finally:
        plain.eos_ids = drafting.eos_ids = (EOS,)


def test_what_was_drafted_and_wrong_is_never_shared(plain: Engine, drafting: Engine, informed: type[Informed]) -> None:
    """A later prompt that continues like a wrong draft finds only the tokens that both have in common."""
    prompt = PROMPT[:8]
    informed.known = [prompt + [7] * 99]
    drafting.generate([prompt], max_new_tokens=24, temperature=0.0, ignore_eos=True)
    for count in (4, 8, 12):
        later, new = prompt + [7] * count, {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True, "logprobs": 2}
        assert drafting.generate([later], **new) == plain.generate([later], **new)


def test_what_was_drafted_and_right_is_shared(model_dir: Path, plain: Engine, informed: type[Informed]) -> None:
    inform(informed, plain)
    fresh = Engine(model_dir, recipe="bf16", block_size=4, max_num_seqs=4, speculative_tokens=8)
    outputs(fresh)
    before = fresh.stats()["prefix_hit_tokens_total"]
    known = informed.known[0]
    fresh.generate([known], max_new_tokens=1)
    assert fresh.stats()["prefix_hit_tokens_total"] - before == (len(known) - 1) // 4 * 4


def test_an_answer_may_fill_the_context(plain: Engine, drafting: Engine, informed: type[Informed]) -> None:
    new = plain.limits.max_model_len - len(PROMPT)
    inform(informed, plain, max_new_tokens=new)
    found = outputs(drafting, max_new_tokens=new)
    assert found == outputs(plain, max_new_tokens=new)
    assert found[-1].num_generated == new


def test_a_cache_for_one_sequence_and_no_more(model_dir: Path, plain: Engine, informed: type[Informed]) -> None:
    """Drafts never ask for a block that plain decoding would not."""
    new = 56 - len(PROMPT)
    inform(informed, plain)
    small = Engine(model_dir, recipe="bf16", block_size=4, num_blocks=14, speculative_tokens=8)
    assert outputs(small, max_new_tokens=new) == outputs(plain, max_new_tokens=new)
    assert small.stats()["preemptions_total"] == 0


def test_answers_of_a_form_are_not_drafted(drafting: Engine, plain: Engine, informed: type[Informed]) -> None:
    informed.known = [PROMPT + [7] * 99]
    before = drafting.stats()["drafts_total"]
    form: dict[str, Any] = {"regex": "(ab)+c", "max_new_tokens": 20, "ignore_eos": False}
    assert outputs(drafting, **form) == outputs(plain, **form)
    assert drafting.stats()["drafts_total"] == before


def test_answers_without_bad_words_are_not_drafted(drafting: Engine, plain: Engine, informed: type[Informed]) -> None:
    """Which words are bad after a draft's token is known only when that token is."""
    said = outputs(plain)
    unwanted = "".join(output.text_delta for output in said)[3:5]
    without = outputs(plain, bad_words=(unwanted,))
    assert without != said
    inform(informed, plain)
    before = drafting.stats()["drafts_total"]
    assert outputs(drafting, bad_words=(unwanted,)) == without
    assert drafting.stats()["drafts_total"] == before


def test_many_answers_to_one_prompt(plain: Engine, drafting: Engine) -> None:
    """By the drafter that users get, on a prompt that repeats itself."""
    prompt = [256, *b"to be or not to be or not to be or not to "]
    sampling: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.7, "seed": 5, "ignore_eos": True, "logprobs": 1}
    assert drafting.generate([prompt] * 6, **sampling) == plain.generate([prompt] * 6, **sampling)


def test_a_text_that_repeats_itself_takes_fewer_steps(model_dir: Path, plain: Engine) -> None:
    """A small model with little temperature soon says the same again and again."""
    sampling: dict[str, Any] = {"max_new_tokens": 100}
    fresh = Engine(model_dir, recipe="bf16", block_size=4, speculative_tokens=8)
    found, taken = steps(fresh, **sampling)
    expected, plainly = steps(plain, **sampling)
    assert found == expected
    assert taken < plainly
    stats = fresh.stats()
    assert stats["generated_tokens_total"] == 100 == taken + stats["accepted_draft_tokens_total"]


def test_the_command_line_says_what_became_of_drafts(model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = ["generate", str(model_dir), "--recipe", "bf16", "--ignore-eos", "to be or not to be"]
    assert main(ask) == 0
    expected = capsys.readouterr()
    assert main([*ask, "--speculative-tokens", "4"]) == 0
    found = capsys.readouterr()
    assert found.out == expected.out
    assert re.search(r"speculation: \d+ of \d+ draft tokens .* 64 tokens in \d+ steps", found.err)
    assert "speculation" not in expected.err


def test_how_many_are_drafted_is_checked(model_dir: Path) -> None:
    for wrong in (-1, 65, 1.5, "many"):
        with pytest.raises(RequestError, match="speculative_tokens"):
            Engine(model_dir, recipe="bf16", speculative_tokens=wrong)
