"""An engine with `tensor_parallel` computes what one process does, and with `invariant` the same bits, refuses what
cannot be divided, and ends its processes. tests/model/test_sharding.py has the families and the recipes."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8serve.engine import follower, rank_processes
from fp8serve.engine.adapters import Adapters
from fp8serve.engine.engine import Engine
from fp8serve.engine.leader import LeadingPacker
from fp8serve.engine.options import LOST_SECONDS, EngineOptions
from fp8serve.engine.rank_group import Op, RankGroup
from fp8serve.engine.rank_processes import check_identities
from fp8serve.errors import Fp8ServeError, GroupError, MachineError, ModelError, RequestError
from fp8serve.fp8.batch_invariant import BatchInvariantLinear
from fp8serve.ranks import Ranks
from tests.patience import PATIENCE, until

from .adapters import write_random_adapter
from .tiny import write_model, write_scales

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 261}  # 261 is not divisible
CLOSE = 0.25
PROMPTS = [list(b"Once upon a time"), list(b"a" * 40), list(b"Hello"), [7]]
SAMPLED: dict[str, Any] = {"max_new_tokens": 6, "seed": 3, "ignore_eos": True, "logprobs": 20}
FP8 = {"kv_cache_dtype": "fp8", "head_dtype": "fp8", "scales": "made-up"}
INVARIANT = {"recipe": "bf16", "invariant": True}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("divided")
    for kind in ("llama", "qwen2_moe"):
        path = write_model(folder / kind, kind, **SIZES)
        write_scales(path, path / "made-up", kv=True)
        write_scales(path, path / "tight", scale=400.0)  # from 1.12 on, inputs saturate
        write_random_adapter(folder / f"{kind}-lora", path)
    write_random_adapter(folder / "llama-dora", folder / "llama", dora=True, rank=3, seed=1)
    return folder


@contextmanager
def engine(path: Path, ranks: int = 1, **options: Any) -> Iterator[Engine]:
    if "scales" in options:
        options |= {"scales": path / options["scales"]}
    created = Engine(
        path, tensor_parallel=ranks, block_size=4, **{"num_blocks": 60, "lost_seconds": PATIENCE} | options
    )
    try:
        yield created
    finally:
        created.close()


def answers(path: Path, ranks: int, adapters: tuple[Path, ...] = (), **options: Any) -> list[Any]:
    """Returns completions and log-probabilities that an engine of `ranks` processes computes, also with preemption and
    with each adapter."""
    with engine(path, ranks, **options) as one:
        results: list[Any] = one.generate(PROMPTS, temperature=0.8, prompt_logprobs=3, **SAMPLED)
        for adapter in adapters:
            name = one.load_adapter(adapter.name, adapter)["name"]
            results += one.generate(PROMPTS, temperature=0.0, adapter=name, **SAMPLED)
            one.unload_adapter(name)
        return results + one.scales()


def children(pid: int = os.getpid()) -> list[int]:
    """Returns the ranks that this process has started."""
    started = Path(f"/proc/{pid}/task").glob("*/children")
    pids = [int(text) for path in started for text in path.read_text().split()]
    return [pid for pid in pids if b"fp8serve.engine.follower" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.distributed
def test_two_processes_compute_the_bits_of_one(models: Path) -> None:
    assert answers(models / "llama", 2, **INVARIANT) == answers(models / "llama", 1, recipe="bf16")


def adapters_of(kind: str, models: Path) -> tuple[Path, ...]:
    return (models / "llama-lora", models / "llama-dora") if kind == "llama" else (models / f"{kind}-lora",)


@pytest.mark.distributed
@pytest.mark.pairwise
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("options", [FP8, {"recipe": "rowwise"}], ids=["fp8", "rowwise"])
@pytest.mark.parametrize("kind", ["llama", "qwen2_moe"])
def test_invariant_bits_do_not_depend_on_the_number_of_processes(
    kind: str, options: dict[str, Any], ranks: int, models: Path
) -> None:
    path, adapters = models / kind, adapters_of(kind, models)
    assert answers(path, ranks, adapters, invariant=True, **options) == answers(path, 1, adapters, **options)


@pytest.mark.distributed
@pytest.mark.pairwise
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("options", [FP8, {"recipe": "rowwise"}, {"recipe": "bf16"}], ids=["fp8", "rowwise", "bf16"])
@pytest.mark.parametrize("kind", ["llama", "qwen2_moe"])
def test_sums_over_ranks_change_answers_by_roundings_and_not_from_run_to_run(
    kind: str, options: dict[str, Any], ranks: int, models: Path
) -> None:
    """The logits of these models have a standard deviation of about 1. A rounding to BF16 changes one by up to 2^-8,
    and a rounding of an input in FP8 that goes the other way changes one element by 2^-4 of it; of a row, few do. So
    log-probabilities differ by less than 2^-2, and the first greedy tokens are equal if no other one is as close."""
    path, adapters = models / kind, adapters_of(kind, models)
    results = answers(path, ranks, adapters, **options)
    assert answers(path, ranks, adapters, **options) == results
    pairs = list(zip(results, answers(path, 1, adapters, **options), strict=True))
    for index, (result, one) in enumerate(pairs[: len(PROMPTS) * (1 + len(adapters))]):  # the rest are statistics
        first, expected = result.logprobs[0], one.logprobs[0]
        values, gap = dict(expected.top), expected.top[0][1] - expected.top[1][1]
        assert all(abs(value - values[token]) < CLOSE for token, value in first.top[:5])
        if index >= len(PROMPTS) and gap > 2 * CLOSE:  # greedy
            assert first.token_id == expected.token_id


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["llama", "qwen2_moe"])
def test_statistics_are_those_of_the_whole_input(kind: str, models: Path) -> None:
    records = []
    for ranks in (1, 2):
        with engine(models / kind, ranks, scales="tight", drift_window=30) as one:
            for prompts in (PROMPTS, [[1, 2, 3]]):  # the first ones complete a window
                one.generate(prompts, max_new_tokens=1)
            assert one.stats()["scale_windows_total"] > 0
            records.append({record["name"]: record for record in one.scales()})
    whole, divided = records
    for name in ("q_proj", "o_proj"):  # whose inputs are before the first sum over the ranks
        record = divided[f"model.layers.0.self_attn.{name}"]
        assert record == whole[f"model.layers.0.self_attn.{name}"]
        assert 0 < record["saturation"] < 1
    for name, record in divided.items():
        for key in ("amax", "saturation"):
            assert record[key] == pytest.approx(whole[name][key], rel=0.1, abs=0.01), name


@pytest.mark.distributed
def test_drafts_and_preemption_change_no_bit(models: Path) -> None:
    draft = write_model(models / "draft", vocab_size=261, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    sampling = SAMPLED | {"temperature": 0.0, "max_new_tokens": 24}
    with engine(models / "llama", 2, recipe="bf16") as two:
        expected = two.generate(PROMPTS, **sampling)
    for options in ({"speculative_tokens": 3}, {"draft_model": str(draft)}):
        with engine(models / "llama", 2, recipe="bf16", num_blocks=18, **options) as two:
            assert two.generate(PROMPTS, **sampling) == expected
            stats = two.stats()
        assert stats["draft_tokens_total"] > 0
        assert stats["preemptions_total"] > 0


@pytest.mark.distributed
def test_an_adapter_that_does_not_fit_changes_nothing(models: Path) -> None:
    with engine(models / "llama", 2, **INVARIANT) as two:
        with pytest.raises(ModelError, match="has no such layer"):
            two.load_adapter("other", models / "qwen2_moe-lora")
        name = two.load_adapter("fits", models / "llama-lora")["name"]
        first = two.generate(PROMPTS, adapter=name, **SAMPLED)
    with engine(models / "llama", recipe="bf16") as one:
        one.load_adapter("fits", models / "llama-lora")
        assert one.generate(PROMPTS, adapter="fits", **SAMPLED) == first


@pytest.mark.distributed
def test_ranks_that_read_different_adapters_have_none(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, read_weights = write_random_adapter(tmp_path / "copy", models / "llama", seed=5), Adapters.read_weights
    with engine(models / "llama", 2, **INVARIANT) as two:
        for other in (copy, models / "llama-dora"):  # the norms of DoRA are summed over the ranks
            with monkeypatch.context() as patch:  # of rank 0 only
                patch.setattr(Adapters, "read_weights", lambda adapters, _, other=other: read_weights(adapters, other))
                with pytest.raises(ModelError, match="llama-lora does not hold the same adapter for all ranks"):
                    two.load_adapter("replaced", models / "llama-lora")
        assert two.load_adapter("replaced", copy)["name"] == "replaced"


@pytest.mark.distributed
def test_a_rank_that_dies_while_the_ranks_connect_is_an_error(models: Path) -> None:
    rank = (
        "import sys; from fp8serve.engine import rank_processes as ranks\n"
        "host, _, port = sys.argv[1].partition(':')\n"
        "ranks._connect_store(host, int(port)).add(ranks.READY_KEY, 1); sys.exit(3)"
    )
    program = (
        "import subprocess, sys; from fp8serve.engine import engine, rank_processes\n"
        f"command = [sys.executable, '-P', '-c', {rank!r}]\n"
        "rank_processes._start_follower = lambda *arguments: subprocess.Popen([*command, arguments[-1]])\n"
        f"engine.Engine({str(models / 'llama')!r}, recipe='bf16', tensor_parallel=2)"
    )
    command = [sys.executable, "-P", "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert "GroupError: Rank 1 of the engine did not start: exit status 3." in result.stderr
    assert result.returncode == 1  # the thread that still connects does not hold the process


@pytest.mark.parametrize(
    ("environment", "num_gpus", "refused"),
    [
        ({}, 1, "2 ranks would run on this machine, whose number of GPUs is 1"),
        ({}, 2, None),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, 1, None),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, 1, "2 ranks would run on this machine"),
    ],
)
def test_more_ranks_than_gpus_are_refused(
    environment: dict[str, str], num_gpus: int, refused: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    expected = nullcontext() if refused is None else pytest.raises(RequestError, match=refused)
    with expected:
        rank_processes._check_options(EngineOptions(device="cuda", tensor_parallel=2))


@pytest.mark.distributed
def test_a_rank_that_dies_ends_the_engine_with_an_error(models: Path) -> None:
    with engine(models / "llama", 2, recipe="bf16") as two:
        (rank,) = children()
        os.kill(rank, 9)
        with pytest.raises(Fp8ServeError, match="Rank 1 of the engine has ended: killed by SIGKILL"):
            two.generate(PROMPTS, **SAMPLED)
    with engine(models / "llama", 2, recipe="bf16") as another:
        assert len(another.generate(PROMPTS, **SAMPLED)) == len(PROMPTS)


@pytest.mark.distributed
@pytest.mark.parametrize("error", [MemoryError, KeyError])
def test_a_step_that_fails_on_rank_0_ends_the_engine(
    error: type[Exception], models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = f"The ranks of the engine cannot continue: {error.__name__}."
    with engine(models / "llama", 2, recipe="bf16") as two:
        with monkeypatch.context() as patch:
            patch.setattr(two.loaded.runner, "run_step", Mock(side_effect=error))
            with pytest.raises(KeyError if error is KeyError else MachineError):
                two.generate(PROMPTS, **SAMPLED)
        assert not children()
        with pytest.raises(MachineError, match=message):
            two.generate(PROMPTS, **SAMPLED)


def test_closing_hides_no_error_and_reports_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    losses: list[Fp8ServeError] = []
    group = RankGroup(Ranks(0, 2), dist.HashStore(), (), losses.append, PATIENCE)
    monkeypatch.setattr("torch.distributed.broadcast", Mock(side_effect=RuntimeError("Connection reset by peer")))
    monkeypatch.setattr("fp8serve.engine.rank_group.leave_group", lambda: None)
    group.close()
    monkeypatch.setattr(group, "_wait_for_loss", lambda: "Rank 1 of the engine has ended: killed by SIGKILL.")
    group._watch()
    assert not losses


@pytest.mark.distributed
def test_a_rank_that_hangs_ends_the_engine_with_an_error(models: Path) -> None:
    with engine(models / "llama", 2, recipe="bf16", lost_seconds=LOST_SECONDS) as two:
        (rank,) = children()
        os.kill(rank, signal.SIGSTOP)
        with pytest.raises(Fp8ServeError, match="Rank 1 of the engine hangs: no sign of life for 8 seconds"):
            two.generate(PROMPTS, **SAMPLED)
        until(lambda: not children(), "the end of the rank that hung")


@pytest.mark.distributed
def test_the_ranks_end_with_the_process_of_the_engine(models: Path) -> None:
    program = (
        "import sys, time; from fp8serve.engine.engine import Engine\n"
        f"engine = Engine({str(models / 'llama')!r}, recipe='bf16', tensor_parallel=2, lost_seconds=600)\n"
        "print('ready', flush=True); time.sleep(10000)"
    )
    process = subprocess.Popen([sys.executable, "-P", "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    ranks = children(process.pid)
    assert len(ranks) == 1
    process.kill()
    process.wait(PATIENCE)
    process.stdout.close()
    until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), "the end of the ranks")


@pytest.mark.parametrize(
    ("kind", "sizes", "options", "message"),
    [
        ("llama", {"num_key_value_heads": 2}, {}, "tensor_parallel 4 does not divide the 2 key/value heads"),
        ("llama", {"intermediate_size": 98}, {}, "does not divide the 98 elements of an MLP"),
        ("qwen2_moe", {"moe_intermediate_size": 50}, {}, "does not divide the 50 elements of an expert"),
        ("olmo3", {}, {}, "normalizes all heads together"),
        (
            "llama",
            {},
            {"cache_dir": "somewhere"},
            "cache_dir needs the whole model in one process; leave out cache_dir or",
        ),
        ("llama", {}, {"roll_history": True}, "roll_history needs the whole model in one process"),
        ("llama", {}, {"device": "cuda:1"}, "each rank has its own GPU; use device cuda, not cuda:1"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_a_process_starts(
    kind: str, sizes: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "model", kind, **SIZES | sizes)
    with pytest.raises(Fp8ServeError, match=message):
        Engine(path, tensor_parallel=4, **options)
    assert not children()


@pytest.mark.distributed
def test_a_model_that_two_processes_have_trained_is_served_by_four(models: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "Once upon a time there was a model."}\n' * 4)
    arguments = "--data", str(data), "--out", str(tmp_path / "job"), "--procs", "2", "--accumulate", "2"
    command = [sys.executable, "-m", "fp8serve", "finetune", str(models / "llama"), *arguments, "--max-steps", "2"]
    subprocess.run([*command, "--seq-len", "32"], check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE)
    trained = tmp_path / "job" / "model"
    assert answers(trained, 4, invariant=True) == answers(trained, 1)


@pytest.mark.distributed
def test_the_weights_of_several_processes_cannot_be_replaced(models: Path) -> None:
    with engine(models / "llama", 2, recipe="bf16") as two:
        with pytest.raises(RequestError, match="tensor_parallel cannot be replaced"):
            two.load_weights(models / "llama")
        with pytest.raises(GroupError, match="close it before the next one"), engine(models / "llama", 2):
            pass
        with pytest.raises(RequestError, match="leave out model or tensor_parallel"):
            Engine(models / "llama", tensor_parallel=2, model=two.loaded.runner.model)


def test_ranks_pack_at_the_same_time() -> None:
    group, modules = Mock(errors=nullcontext), [nn.Linear(64, 64, dtype=torch.bfloat16) for _ in range(3)]
    packer = LeadingPacker(group, [BatchInvariantLinear.convert(module) for module in modules])
    packer.pack(0.0)
    assert packer.has_pending
    group.send.assert_not_called()
    packer.pack()
    assert group.send.mock_calls == [call(Op.PACK)] * 3
    group.receive.side_effect = [*[(Op.PACK, None)] * 2, MachineError("end")]
    loaded = Mock()
    with pytest.raises(MachineError, match="end"):
        follower._run(group, loaded)
    assert loaded.packer.mock_calls == [call.pack_next()] * 2


def test_ranks_of_another_version_are_refused() -> None:
    here = {"fp8serve's version": "1", "model files": "x"}
    check_identities([here, here])
    with pytest.raises(GroupError, match="rank 2 differs from rank 0 in fp8serve's version"):
        check_identities([here, here, {"fp8serve's version": "2", "model files": "y"}])


def test_ranks_whose_kernels_have_other_bits_are_refused(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def identities(numerics: tuple[str, str], **options: Any) -> list[dict[str, object]]:
        results = []
        for attention, mm in (("tiles", "four_lanes"), numerics):
            kernels = {"paged_attention": {"numerics": attention}, "mm": {"numerics": mm}}
            monkeypatch.setattr(rank_processes, "cpu_kernels", lambda kernels=kernels: kernels)
            results.append(rank_processes._identity(models / "llama", EngineOptions(device="cpu", **options)))
        return results

    check_identities(identities(("other tiles", "four_lanes")))
    for different in (identities(("tiles", "pairs")), identities(("other tiles", "four_lanes"), invariant=True)):
        with pytest.raises(GroupError, match="rank 1 differs from rank 0 in the numerics classes of its processor's"):
            check_identities(different)


def test_ranks_of_other_weights_or_scales_are_refused(tmp_path: Path) -> None:
    paths = [write_model(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    sizes = [[(file.name, file.stat().st_size) for file in path.glob("*.safetensors")] for path in paths]
    assert sizes[0] == sizes[1]
    options = EngineOptions(tensor_parallel=2)
    with pytest.raises(GroupError, match="rank 1 differs from rank 0 in the model files"):
        check_identities([rank_processes._identity(path, options) for path in paths])
    scales = [EngineOptions(tensor_parallel=2, scales=str(tmp_path / name)) for name in ("a", "b", "copy of a")]
    for one, content in zip(scales, ("a", "b", "a"), strict=True):
        Path(str(one.scales)).write_text(content)
    first, second, copy = (rank_processes._identity(paths[0], one) for one in scales)
    check_identities([first, copy])
    with pytest.raises(GroupError, match="rank 1 differs from rank 0 in the file of scales"):
        check_identities([first, second])
