"""The scheduler: chunked prefill, fairness among tenants, preemption; in thousands of random schedules, every request
ends and every block is freed."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8serve.engine.kv_cache import BlockPool
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.engine.scheduler import Scheduler, Work
from fp8serve.engine.sequence import Sequence, Status


def make(num_blocks: int = 64, block_size: int = 4, seqs: int = 4, tokens: int = 16, prefill: int = 8) -> Scheduler:
    return Scheduler(BlockPool(num_blocks, block_size), seqs, tokens, prefill)


def sequence(
    name: str, prompt: int, new: int = 4, tenant: str = "", fill: int | None = None, group: str = ""
) -> Sequence:
    tokens = [hash(name) % 1000 + i for i in range(prompt)] if fill is None else [fill] * prompt
    return Sequence.of(Request(name, tuple(tokens), SamplingParams(max_new_tokens=new, seed=0), tenant, group))


def run_step(scheduler: Scheduler) -> list[Work]:
    """One step of an engine whose model always says token 7."""
    work = scheduler.schedule()
    scheduler.launch(work)
    sampled = [item.seq for item in work if item.needs_sample]
    scheduler.advance(work)
    for seq in sampled:
        seq.token_ids.append(7)
        if seq.num_generated == seq.params.max_new_tokens:
            scheduler.finish(seq, "length")
    return work


def token_counts(work: list[Work]) -> dict[str, int]:
    return {item.seq.request_id: item.count for item in work}


def test_a_long_prompt_is_prefilled_in_chunks_beside_decoding() -> None:
    scheduler = make()
    scheduler.add(sequence("short", 3, new=20))
    assert token_counts(run_step(scheduler)) == {"short": 3}
    scheduler.add(sequence("long", 20))
    assert [token_counts(run_step(scheduler)) for _ in range(4)] == [
        {"short": 1, "long": 8},
        {"short": 1, "long": 8},
        {"short": 1, "long": 4},
        {"short": 1, "long": 1},
    ]


def test_a_single_prompt_gets_the_whole_budget() -> None:
    scheduler = make()
    scheduler.add(sequence("a", 20))
    scheduler.add(sequence("b", 10))
    assert token_counts(run_step(scheduler)) == {"a": 16}
    assert token_counts(run_step(scheduler)) == {"a": 4, "b": 10}


def test_tenants_are_admitted_in_turn() -> None:
    scheduler = make(seqs=1)
    for name in ("a1", "a2", "a3"):
        scheduler.add(sequence(name, 2, new=1, tenant="a"))
    scheduler.add(sequence("b1", 2, new=1, tenant="b"))
    order = [next(iter(token_counts(run_step(scheduler)))) for _ in range(4)]
    assert order == ["a1", "b1", "a2", "a3"]


def test_groups_of_a_tenant_are_admitted_in_turn() -> None:
    scheduler = make(seqs=1)
    for name in ("a1", "a2", "a3"):
        scheduler.add(sequence(name, 2, new=1, group="a"))
    scheduler.add(sequence("b", 2, new=1))
    order = [next(iter(token_counts(run_step(scheduler)))) for _ in range(4)]
    assert order == ["a1", "b", "a2", "a3"]


@pytest.mark.parametrize("tenants", ["same", "different"])
def test_a_request_of_many_sequences_is_preempted_for_one_of_few(tenants: str) -> None:
    """All slots are taken by long sequences of the large request."""
    scheduler = make(num_blocks=400, seqs=4)
    for i in range(20):
        scheduler.add(sequence(f"a{i}", 2, new=50, group="a"))
    for _ in range(5):
        run_step(scheduler)
    assert len(scheduler.running) == 4
    scheduler.add(sequence("b", 2, new=1, tenant="" if tenants == "same" else "b"))
    assert "b" in token_counts(run_step(scheduler))
    scheduler.add(sequence("c", 2, new=1, tenant="" if tenants == "same" else "c"))
    assert "c" in token_counts(run_step(scheduler))
    run_to_the_end(scheduler)


def test_tenants_share_slots_equally_whatever_their_number_of_requests() -> None:
    scheduler = make(num_blocks=400, seqs=4)
    for i in range(20):
        scheduler.add(sequence(f"a{i}", 2, new=50, tenant="a"))
    run_step(scheduler)
    for i in range(20):
        scheduler.add(sequence(f"b{i}", 2, new=50, tenant="b"))
    for _ in range(8):
        run_step(scheduler)
    assert sorted(seq.tenant for seq in scheduler.running) == ["a", "a", "b", "b"]
    before = scheduler.num_preemptions
    for _ in range(8):
        run_step(scheduler)
    assert scheduler.num_preemptions == before  # the shares are stable
    run_to_the_end(scheduler)


def test_single_requests_of_one_tenant_do_not_preempt_each_other() -> None:
    scheduler = make(num_blocks=400, seqs=4)
    for i in range(9):
        scheduler.add(sequence(f"a{i}", 2, new=6))
    run_to_the_end(scheduler)
    assert scheduler.num_preemptions == 0


def test_a_request_of_many_sequences_is_preempted_for_memory() -> None:
    scheduler = make(num_blocks=12, seqs=8)
    for i in range(4):
        scheduler.add(sequence(f"a{i}", 8, new=2, group="a"))
    run_step(scheduler)
    run_step(scheduler)
    scheduler.add(sequence("b", 4, new=1, tenant="b"))
    assert any("b" in token_counts(run_step(scheduler)) for _ in range(2))
    run_to_the_end(scheduler)


def test_long_prompts_of_one_request_do_not_delay_another_request() -> None:
    scheduler = make(num_blocks=400, seqs=8, tokens=16, prefill=8)
    for i in range(4):
        scheduler.add(sequence(f"a{i}", 100, new=1, group="a"))
    while len(scheduler.running) < 1:
        run_step(scheduler)
    newest = sequence("b", 10, new=1)
    assert scheduler.pool.allocate(newest)
    scheduler._add_running(newest)
    newest.status = Status.RUNNING
    steps = 0
    while scheduler.running[-1].request_id == "b":
        run_step(scheduler)
        steps += 1
    assert steps <= -(-100 // 16) + 2


def run_to_the_end(scheduler: Scheduler) -> None:
    for _ in range(10_000):
        if not scheduler.has_work():
            break
        run_step(scheduler)
    assert not scheduler.has_work()
    assert scheduler.pool.num_free == scheduler.pool.num_blocks


def test_a_large_request_is_not_overtaken() -> None:
    scheduler = make(num_blocks=6)
    scheduler.add(sequence("first", 8, new=3))
    run_step(scheduler)
    scheduler.add(sequence("large", 20, new=1))
    scheduler.add(sequence("small", 1, new=1))
    while "large" not in token_counts(work := run_step(scheduler)):
        assert "small" not in token_counts(work)


def test_the_youngest_is_preempted_and_resumes_first() -> None:
    scheduler = make(num_blocks=4)
    old, young = sequence("old", 4, new=8), sequence("young", 4, new=8)
    scheduler.add(old)
    scheduler.add(young)
    scheduler.add(late := sequence("late", 1, new=1))
    statuses = []
    while scheduler.has_work():
        run_step(scheduler)
        statuses.append(young.status)
        if young.status is Status.PREEMPTED:
            assert late.status is Status.WAITING
    assert Status.PREEMPTED in statuses
    assert [len(seq.token_ids) for seq in (old, young, late)] == [12, 12, 2]
    assert scheduler.num_preemptions == 1
    assert scheduler.pool.num_used == 0


def test_several_answers_to_one_prompt_compute_it_once() -> None:
    scheduler = make(tokens=32)
    for name in "abc":
        scheduler.add(sequence(name, 38, new=3, fill=1))
    assert token_counts(run_step(scheduler)) == {"a": 32}
    assert token_counts(run_step(scheduler)) == {"a": 6}
    assert token_counts(run_step(scheduler)) == {"a": 1, "b": 2, "c": 2}


def test_a_sequence_waiting_for_a_prefix_computes_the_rest_when_its_owner_is_aborted() -> None:
    scheduler = make(tokens=32)
    owner, heir = sequence("owner", 38, fill=1), sequence("heir", 38, fill=1)
    scheduler.add(owner)
    scheduler.add(heir)
    run_step(scheduler)
    scheduler.finish(owner, "abort")
    assert token_counts(run_step(scheduler)) == {"heir": 6}  # the 32 tokens that the owner computed are still cached


def test_prefix_hits_are_counted() -> None:
    scheduler = make()
    scheduler.add(sequence("a", 9, fill=1))
    run_step(scheduler)
    scheduler.add(again := sequence("b", 9, fill=1))
    run_step(scheduler)
    assert again.num_cached == 8
    assert (scheduler.num_prefix_hits, scheduler.num_prefix_queried) == (8, 18)


@pytest.mark.parametrize("steps", range(6))
def test_abort_at_any_point_frees_everything(steps: int) -> None:
    scheduler = make(num_blocks=4, seqs=2)
    seqs = [sequence(name, 6, new=6) for name in "abc"]
    for seq in seqs:
        scheduler.add(seq)
    for _ in range(steps):
        run_step(scheduler)
    for seq in seqs:
        scheduler.finish(seq, "abort")
        scheduler.finish(seq, "abort")  # a second time changes nothing
    assert not scheduler.has_work()
    assert scheduler.pool.num_used == 0


@settings(max_examples=400)
@given(st.integers(0, 2**32), st.integers(4, 20), st.integers(1, 4), st.integers(1, 5), st.integers(1, 12))
def test_every_request_ends_and_every_block_returns(seed: int, blocks: int, size: int, seqs: int, extra: int) -> None:
    rng = random.Random(seed)
    scheduler = make(blocks, size, seqs, tokens=seqs + extra, prefill=rng.randint(1, 8))
    capacity = blocks * size
    pending = [random_sequence(rng, str(i), capacity) for i in range(rng.randint(1, 12))]
    added: list[Sequence] = []
    steps = 0
    while pending or scheduler.has_work():
        while pending and rng.random() < 0.5:
            added.append(pending.pop())
            scheduler.add(added[-1])
        if added and rng.random() < 0.05:
            scheduler.finish(rng.choice(added), "abort")
        if scheduler.has_work():
            check_step(scheduler, run_step(scheduler))
        steps += 1
        assert steps < 20_000
    assert scheduler.pool.num_used == 0
    assert not scheduler.pool._in_progress
    assert all(seq.status is Status.FINISHED for seq in added)


def random_sequence(rng: random.Random, name: str, capacity: int) -> Sequence:
    prompt = rng.randint(1, capacity)
    return sequence(
        name,
        prompt,
        new=rng.randint(1, capacity + 1 - prompt),
        tenant=rng.choice("ab"),
        fill=rng.randint(0, 1),
        group=rng.choice(("", "x", "y")),
    )


def check_step(scheduler: Scheduler, work: list[Work]) -> None:
    assert work, "there was work, and nobody did any"
    assert all(item.count > 0 for item in work)
    assert sum(item.count for item in work) <= scheduler.max_batch_tokens
    assert len({id(item.seq) for item in work}) == len(work)
    assert len(scheduler.running) <= scheduler.max_num_seqs
    blocks = {block for seq in scheduler.running for block in seq.block_table}
    assert len(blocks) == scheduler.pool.num_used
