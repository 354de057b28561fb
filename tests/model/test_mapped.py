"""Memory-mapped files: released pages leave the resident memory, and are loaded again when they are read."""

import os
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fp8serve.errors import MachineError, ModelError
from fp8serve.model.storage.mapping import Span, join_spans, map_file, release_pages, span_of

SIZE = 8 << 20
SMAPS, MEMINFO = Path("/proc/self/smaps"), Path("/proc/meminfo")


def write(path: Path) -> Tensor:
    values = torch.arange(SIZE // 4, dtype=torch.int32)
    path.write_bytes(values.numpy().tobytes())
    return values


def resident_kib(path: Path) -> int:
    """Returns the resident memory of the file's mappings in this process, in KiB."""
    kib, ours = 0, False
    for line in SMAPS.read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            kib += int(line.split()[1])
    return kib


def exact_kib(path: Path) -> int:
    """Returns the size of the file's mappings in this process in which a fault reads a single page, in KiB."""
    kib, size, ours = 0, 0, False
    for line in SMAPS.read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            ours = line.endswith(str(path))
        elif line.startswith("Size:"):
            size = int(line.split()[1])
        elif line.startswith("VmFlags:") and ours and " rr" in line:
            kib += size
    return kib


def test_the_bytes_are_those_of_the_file(tmp_path: Path) -> None:
    values = write(tmp_path / "file")
    assert torch.equal(map_file(tmp_path / "file").view(torch.int32), values)


def test_writing_stays_in_this_process(tmp_path: Path) -> None:
    before = write(tmp_path / "file").numpy().tobytes()
    map_file(tmp_path / "file")[:100] = 7
    assert (tmp_path / "file").read_bytes() == before


@pytest.mark.skipif(not SMAPS.exists(), reason="only Linux tells what is resident")
def test_released_pages_leave_memory_and_can_be_read_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    values = write(path)
    whole = map_file(path)
    assert int(whole.sum()) > 0
    assert resident_kib(path) >= SIZE >> 10
    release_pages(whole[: SIZE // 2])
    assert resident_kib(path) <= (SIZE >> 11) + 64
    assert torch.equal(whole.view(torch.int32), values)


def test_alternating_rows_release_the_pages_between_them(tmp_path: Path) -> None:
    path = tmp_path / "file"
    values = write(path)
    whole = map_file(path)
    assert int(whole.sum()) > 0
    release_pages(whole.view(-1, 1024)[::2])
    assert resident_kib(path) <= 64
    assert torch.equal(whole.view(torch.int32), values)


def test_data_beside_the_released_pages_are_not_lost(tmp_path: Path) -> None:
    """Only whole pages are released, so that neighbouring data are not lost."""
    write(tmp_path / "file")
    whole = map_file(tmp_path / "file")
    whole[10_000], whole[50_000] = 1, 2
    release_pages(whole[10_001:50_000])
    assert whole[10_000] == 1
    assert whole[50_000] == 2


def test_release_pages_does_not_change_other_tensors() -> None:
    tensor = torch.arange(100_000)
    release_pages(tensor)
    assert torch.equal(tensor, torch.arange(100_000))


def span(tensor: Tensor) -> Span:
    result = span_of(tensor)
    assert result is not None
    return result


@pytest.mark.skipif(not SMAPS.exists(), reason="only Linux tells what is resident")
def test_a_dropped_span_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    values = write(path)
    whole = map_file(path)
    assert span_of(values) is None
    half = span(whole[: SIZE // 2])
    assert (half.start, half.size, half.file.path) == (0, SIZE // 2, path)
    for access in (half.read, half.advise, lambda: whole.sum()):
        access()
    half.drop()
    assert resident_kib(path) <= (SIZE >> 11) + 64
    assert torch.equal(whole.view(torch.int32), values)


@pytest.mark.skipif(not SMAPS.exists(), reason="only Linux tells how faults read")
def test_other_spans_are_read_with_their_neighbours(tmp_path: Path) -> None:
    write(tmp_path / "file")
    whole = map_file(tmp_path / "file")
    span(whole[10_000 : SIZE // 2]).read_exactly()
    assert abs(exact_kib(tmp_path / "file") - (SIZE >> 11)) < 64


def test_adjacent_spans_are_joined(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / name)
    a, b = map_file(tmp_path / "a"), map_file(tmp_path / "b")
    spans = [span(part) for part in (b[:8], a[32:40], a[16:32], a[0:8], a[4:10])]
    assert join_spans(spans) == [span(a[:10]), span(a[16:40]), span(b[:8])]


@pytest.mark.parametrize("size", [SIZE // 2, SIZE])
def test_a_file_that_is_written_to_is_one_sentence(size: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    write(path)
    os.utime(path, ns=(0, 0))
    whole = map_file(path)
    span(whole).read()
    with path.open("r+b") as file:
        file.truncate(size)
        file.write(b"other weights")
    with pytest.raises(MachineError, match="file cannot be read: it was written to while it was in use, or its disk"):
        span(whole[: SIZE // 4]).read()


def test_a_file_that_was_replaced_is_read_as_it_was(tmp_path: Path) -> None:
    values = write(tmp_path / "file")
    whole = map_file(tmp_path / "file")
    (tmp_path / "other").write_bytes(bytes(SIZE))
    (tmp_path / "other").replace(tmp_path / "file")
    span(whole).read()
    assert torch.equal(whole.view(torch.int32), values)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="file is empty; copy or download it again"):
        map_file(tmp_path / "file")


@pytest.mark.skipif(not MEMINFO.exists(), reason="only Linux tells the size of memory")
def test_a_file_larger_than_memory_can_be_mapped(tmp_path: Path) -> None:
    """Linux refuses to reserve more memory than the machine has, and a private mapping would reserve its size."""
    sizes = re.findall(r"(?:MemTotal|SwapTotal): +(\d+) kB", MEMINFO.read_text())
    size = 1024 * sum(map(int, sizes)) + (1 << 30)
    with (tmp_path / "file").open("wb") as file:
        file.truncate(size)  # takes no space
    whole = map_file(tmp_path / "file")
    assert len(whole) == size
    assert whole[-1] == 0
