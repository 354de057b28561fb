"""A prefix cache on disk, restored by a later engine: it changes no bit, and damaged files are ignored."""

import errno
import logging
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fp8serve.engine import saved_prefixes
from fp8serve.engine.client import EngineClient
from fp8serve.engine.engine import Engine
from fp8serve.engine.kv_cache import BlockPool
from fp8serve.engine.options import EngineOptions
from fp8serve.engine.request import Request
from fp8serve.engine.sampling_params import SamplingParams
from fp8serve.errors import Fp8ServeError, RequestError
from tests.patience import until

from .test_independence import MODES, engine, large_dir, request, run  # noqa: F401  # a fixture
from .tiny import write_model

PROMPTS = [[256, *b"It was the best of times, it was the worst"], [256, *b"It was the best of times, too"]]
SAMPLING: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 6, "logprobs": 2}


def start_engine(model: Path, folder: Path, **options: Any) -> Engine:
    return Engine(model, **{"recipe": "bf16", "block_size": 4, "cache_dir": str(folder), **options})


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def restored_hits(engine: Engine) -> int:
    return int(engine.stats()["prefix_restored_hit_tokens_total"])


@pytest.mark.parametrize("mode", ["bf16", "fp8 cache, fp8 head", "weights only", "windows, fp8 cache"])
def test_restored_prefixes_change_no_bit(large_dir: Path, mode: str, tmp_path: Path) -> None:  # noqa: F811
    """Sampled answers of two tenants; the last cache is too small for all blocks."""
    assert mode in MODES
    rng = random.Random(7)
    requests = [request(rng, f"mine {i}") for i in range(12)]
    expected = {name: outputs for r in requests for name, outputs in run(engine(large_dir, mode), [r], rng).items()}
    hits = []
    for blocks in (200, 200, 40):
        caching = engine.__wrapped__(large_dir, mode, cache_dir=str(tmp_path), num_blocks=blocks)
        assert run(caching, requests, rng) == expected
        caching.save_prefixes()
        hits.append(restored_hits(caching))
    assert hits[0] == 0 < hits[1]


def test_saved_prefixes_are_found_only_by_their_tenant(model_dir: Path, tmp_path: Path) -> None:
    first = start_engine(model_dir, tmp_path)
    first.generate(PROMPTS[:1], **SAMPLING)
    first.save_prefixes()
    assert stat.S_IMODE(only_file(tmp_path).stat().st_mode) == 0o600
    params = SamplingParams(max_new_tokens=1)
    for tenant, hits in (("other", 0), ("default", 0), ("", len(PROMPTS[0]) // 4 * 4)):
        second = start_engine(model_dir, tmp_path)
        run(second, [Request("a", tuple(PROMPTS[0]), params, tenant=tenant)], random.Random(0))
        assert restored_hits(second) == second.stats()["prefix_hit_tokens_total"] == hits, tenant


Damage = Callable[[Path], object]


def flip_a_bit(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    whole[len(whole) * 3 // 4] ^= 1
    path.write_bytes(whole)


def replace_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGE: dict[str, Damage] = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "only a header": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "empty": lambda path: path.write_bytes(b""),
    "another file": lambda path: path.write_bytes(os.urandom(10_000)),
    "a bit": flip_a_bit,
    "a fifo": replace_by_fifo,
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_damaged_file_is_ignored_with_a_warning(
    model_dir: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = start_engine(model_dir, tmp_path)
    expected = first.generate(PROMPTS, **SAMPLING)
    first.save_prefixes()
    DAMAGE[damage](only_file(tmp_path))
    second = start_engine(model_dir, tmp_path)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(only_file(tmp_path)) in caplog.text
    assert second.generate(PROMPTS, **SAMPLING) == expected
    assert restored_hits(second) == 0
    second.save_prefixes()
    third = start_engine(model_dir, tmp_path)
    assert third.generate(PROMPTS, **SAMPLING) == expected
    assert restored_hits(third) > 0


def test_other_weights_or_options_start_with_an_empty_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, folder = write_model(tmp_path / "model"), tmp_path / "kept"
    first = start_engine(model, folder)
    first.generate(PROMPTS, **SAMPLING)
    first.save_prefixes()
    for options in ({"recipe": "w8a16"}, {"block_size": 8}):  # each combination has its own file
        assert not start_engine(model, folder, **options).scheduler.pool.cached_blocks()
    assert not caplog.records
    write_model(model, seed=1)
    other = start_engine(model, folder)
    assert "other weights" in caplog.text
    answers = other.generate(PROMPTS, **SAMPLING)
    assert answers == Engine(model, recipe="bf16").generate(PROMPTS, **SAMPLING)
    assert restored_hits(other) == 0


def test_files_of_deleted_models_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    for name in ("gone", "stays"):
        engine = start_engine(write_model(tmp_path / name), folder)
        engine.generate(PROMPTS, **SAMPLING)
        engine.save_prefixes()
    (folder / f".x{saved_prefixes.SUFFIX}.tmp-0").touch()  # left by a killed process
    (folder / "a note of mine.safetensors").touch()
    (tmp_path / "gone").rename(tmp_path / "elsewhere")
    start_engine(tmp_path / "stays", folder)
    assert sorted(path.name[:5] for path in folder.iterdir()) == ["a not", "stays"]


def test_the_most_recently_used_blocks_are_saved_up_to_the_limit(model_dir: Path, tmp_path: Path) -> None:
    block_bytes = start_engine(model_dir, tmp_path).loaded.runner.block_bytes
    first = start_engine(model_dir, tmp_path, cache_dir_bytes=8 * block_bytes + 1)
    for prompt in ([7] * 20, PROMPTS[0][:21]):
        first.generate([prompt], temperature=0.0, max_new_tokens=1)
    first.save_prefixes()
    second = start_engine(model_dir, tmp_path)
    assert len(second.scheduler.pool.cached_blocks()) == 8
    second.generate([PROMPTS[0][:21]], temperature=0.0, max_new_tokens=1)
    assert restored_hits(second) == 20
    small = start_engine(model_dir, tmp_path, num_blocks=3)
    assert [key for key, _ in small.scheduler.pool.cached_blocks()] == [
        k for k, _ in first.scheduler.pool.cached_blocks()
    ][:3]


def test_a_pool_gives_away_what_was_restored_last_of_all() -> None:
    pool, hashes = BlockPool(6, 4), [bytes([i]) * 16 for i in range(4)]
    assert pool.restore(hashes) == [0, 1, 2, 3]
    assert [key for key, _ in pool.cached_blocks()] == hashes
    blocks = [pool._allocate_block() for _ in range(6)]
    assert blocks == [4, 5, 3, 2, 1, 0]
    assert not pool.cached_blocks()


def test_prefixes_are_written_while_the_engine_runs(model_dir: Path, tmp_path: Path) -> None:
    running = start_engine(model_dir, tmp_path, cache_dir_seconds=1e-6)
    running.generate(PROMPTS, **SAMPLING)
    until(lambda: any(not path.name.startswith(".") for path in tmp_path.iterdir()))


def test_a_full_disk_or_memory_leaves_the_old_file(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = start_engine(model_dir, tmp_path)
    first.generate(PROMPTS[:1], **SAMPLING)
    first.save_prefixes()
    before = only_file(tmp_path).read_bytes()

    def full(path: Path, tensors: Any, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    def no_memory(blocks: Any) -> None:
        raise RuntimeError("not enough memory: you tried to allocate 4 bytes")

    monkeypatch.setattr(saved_prefixes, "save_tensors", full)
    first.generate(PROMPTS[1:], **SAMPLING)
    first.save_prefixes()
    assert "No space left" in caplog.text
    monkeypatch.setattr(first.loaded.runner, "copy_blocks", no_memory)
    first.save_prefixes()
    assert "because memory is short" in caplog.text
    assert only_file(tmp_path).read_bytes() == before
    monkeypatch.undo()
    first.save_prefixes()
    assert only_file(tmp_path).read_bytes() != before


async def test_a_process_that_ends_cleanly_keeps_them(model_dir: Path, tmp_path: Path) -> None:
    options = EngineOptions(recipe="bf16", block_size=4, cache_dir=str(tmp_path))
    mine, outputs = Request("a", tuple(PROMPTS[0]), SamplingParams(max_new_tokens=4, temperature=0.0)), []
    for ends in ("close", "drain", "kill"):
        client = await EngineClient.start(model_dir, options)
        outputs.append([output.token_ids async for output in client.generate(mine)])
        hits = (await client.stats())["prefix_restored_hit_tokens_total"]
        assert hits == (0 if len(outputs) == 1 else len(PROMPTS[0]) // 4 * 4)
        await (client.close() if ends == "close" else client.drain(1.0) if ends == "drain" else client.kill("ended"))
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache_dir": None, "cache_dir_bytes": 5}, "cache_dir_bytes needs cache_dir"),
        ({"cache_dir": None, "cache_dir_seconds": 5.0}, "cache_dir_seconds needs cache_dir"),
        ({"cache_dir": "kept", "roll_history": True}, "leave one of the two out"),
        ({"cache_dir": ""}, "cache_dir"),
    ],
)
def test_options_that_do_not_fit_each_other_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        EngineOptions(**options)


def test_a_place_that_is_no_directory_is_refused(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Fp8ServeError, match="cannot be created for the prefix cache"):
        start_engine(model_dir, tmp_path / "file")
    with pytest.raises(RequestError, match="less than the size of one block"):
        start_engine(model_dir, tmp_path / "kept", cache_dir_bytes=1)
