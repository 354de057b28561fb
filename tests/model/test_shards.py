"""Malformed safetensors and hostile indexes: one sentence each, nothing read outside the directory."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fp8serve.errors import ModelError
from fp8serve.model.storage.shards import SAFE_WEIGHTS, SAFE_WEIGHTS_INDEX, open_shards, read_header


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(begin: int = 0, end: int = 4, **values: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [1], "data_offsets": [begin, end]} | values


FOUR = b"\0" * 4
MALFORMED = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "header longer than the file": file_of({}, length=1000),
    "header of exabytes": file_of({}, length=2**63),
    "not JSON": file_of(b"{not json"),
    "not UTF-8": file_of(b"\xff\xfe"),
    "not an object": file_of([1, 2]),
    "nested for ever": file_of(b"[" * 100_000),
    "duplicate key": file_of(b'{"a":%b,"a":%b}' % ((json.dumps(tensor()).encode(),) * 2), FOUR),
    "entry is a number": file_of({"a": 1}),
    "unknown type": file_of({"a": tensor(dtype="F7")}, FOUR),
    "no type": file_of({"a": {"shape": [1], "data_offsets": [0, 4]}}, FOUR),
    "no shape": file_of({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, FOUR),
    "negative shape": file_of({"a": tensor(shape=[-1])}, FOUR),
    "shape overflows": file_of({"a": tensor(shape=[2**62, 2**62])}, FOUR),
    "shape and size differ": file_of({"a": tensor(shape=[2])}, FOUR),
    "truncated data": file_of({"a": tensor()}, b"\0\0"),
    "data beyond the last tensor": file_of({"a": tensor()}, FOUR * 2),
    "offsets reversed": file_of({"a": tensor(4, 0)}, FOUR),
    "overlapping tensors": file_of({"a": tensor(), "b": tensor()}, FOUR),
    "a hole between tensors": file_of({"a": tensor(), "b": tensor(8, 12)}, FOUR * 3),
    "name is a path": file_of({"../../etc/passwd": tensor()}, FOUR),
    "name has a NUL": file_of({"a\0b": tensor()}, FOUR),
    "name is empty": file_of({"": tensor()}, FOUR),
    "metadata is not text": file_of({"__metadata__": {"a": 1}, "a": tensor()}, FOUR),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_refused_in_one_sentence(case: str, tmp_path: Path) -> None:
    (tmp_path / SAFE_WEIGHTS).write_bytes(MALFORMED[case])
    with pytest.raises(ModelError) as caught:
        open_shards(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


@settings(max_examples=200)
@given(data=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(data)
    try:
        entries, _ = read_header(path)
    except ModelError:
        return
    assert isinstance(entries, dict)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Two shards with one tensor each."""
    directory = tmp_path / "model"
    directory.mkdir()
    save_file({"a": torch.ones(2)}, directory / "model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(3)}, directory / "model-00002-of-00002.safetensors")
    index(directory, {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"})
    return directory


def index(directory: Path, weight_map: Any) -> None:
    (directory / SAFE_WEIGHTS_INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_are_one_mapping(sharded: Path) -> None:
    shards = open_shards(sharded)
    assert {name: t.tolist() for name, t in shards.items()} == {"a": [1, 1], "b": [0, 0, 0]}


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../secret.safetensors"}, "not a plain .safetensors file name"),
        ({"a": "/etc/secret.safetensors"}, "not a plain .safetensors file name"),
        ({"a": "sub/x.safetensors"}, "not a plain .safetensors file name"),
        ({"a": "..\\x.safetensors"}, "not a plain .safetensors file name"),
        ({"a": "config.json"}, "not a plain .safetensors file name"),
        ({"a": "x\0.safetensors"}, "not a plain .safetensors file name"),
        ({"a": "absent.safetensors"}, r"absent\.safetensors does not exist"),
        ({"z": "model-00001-of-00002.safetensors"}, "places 'z' in model-00001-of-00002.safetensors, which does not"),
        ({"a": 3}, "no weight_map"),
        ({}, "no weight_map"),
        ([], "no weight_map"),
    ],
)
def test_hostile_index_is_refused(sharded: Path, weight_map: Any, message: str) -> None:
    save_file({"a": torch.ones(1)}, sharded.parent / "secret.safetensors")
    index(sharded, weight_map)
    with pytest.raises(ModelError, match=message):
        open_shards(sharded)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "model-00001-of-00002.safetensors"}, r"contradicts it \('model-00001-of-00002.safetensors'\); remove"),
        ({"a": "model.safetensors", "b": "model.safetensors"}, r"contradicts it \('b'\)"),
    ],
)
def test_a_single_file_beside_an_index_of_others_is_refused(sharded: Path, weight_map: Any, message: str) -> None:
    save_file({"a": torch.ones(1)}, sharded / "model.safetensors")
    index(sharded, {"a": "model.safetensors"})
    assert list(open_shards(sharded)) == ["a"]
    index(sharded, weight_map)
    with pytest.raises(ModelError, match=message):
        open_shards(sharded)


def test_link_to_elsewhere_is_refused(sharded: Path) -> None:
    save_file({"a": torch.ones(1)}, sharded.parent / "elsewhere.safetensors")
    (sharded / "link.safetensors").symlink_to("../elsewhere.safetensors")
    index(sharded, {"a": "link.safetensors"})
    with pytest.raises(ModelError, match="link to a file outside"):
        open_shards(sharded)


def test_links_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"a": torch.ones(1)}, blobs / "0123")
    (snapshot / SAFE_WEIGHTS).symlink_to("../../blobs/0123")
    assert open_shards(snapshot)["a"].tolist() == [1]


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / SAFE_WEIGHTS)
    with pytest.raises(ModelError, match="not a regular file"):
        open_shards(tmp_path)


def test_pickled_weights_are_refused_by_name_and_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is a pickle, which is never read"):
        open_shards(tmp_path)


def test_every_truncation_of_a_file_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(5), "b": torch.ones(2, 2)}, tmp_path / SAFE_WEIGHTS)
    whole = (tmp_path / SAFE_WEIGHTS).read_bytes()
    for size in range(len(whole)):
        (tmp_path / SAFE_WEIGHTS).write_bytes(whole[:size])
        with pytest.raises(ModelError):
            open_shards(tmp_path)


def test_writing_to_a_mapped_tensor_does_not_change_the_file(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / SAFE_WEIGHTS)
    open_shards(tmp_path)["a"].zero_()
    assert open_shards(tmp_path)["a"].tolist() == [1, 1, 1, 1]
