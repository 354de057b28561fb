"""Files of a model directory are opened by one function, which follows no symbolic link out of the directory."""

import ast
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from safetensors.torch import save_file

import fp8serve
from fp8serve.errors import Fp8ServeError, ModelError
from fp8serve.model.adapters import read_adapter
from fp8serve.model.checkpoint import kv_scales, open_checkpoint
from fp8serve.model.config.decoder import read_any_config
from fp8serve.model.config.modules_json import read_modules
from fp8serve.model.device import estimate_weight_memory
from fp8serve.model.formats.scales import load_scales
from fp8serve.model.network.pooling import read_pooling
from fp8serve.model.storage.files import COPIED_FILES
from fp8serve.model.storage.headers import require_finite
from fp8serve.model.storage.opening import open_file, open_member, real_path
from fp8serve.model.storage.shards import open_shards, read_header
from fp8serve.model.text.tokenizer import Tokenizer
from fp8serve.train.checkpointing import model_digest
from tests.tiny import write_tiny_model

SECRET = "not for strangers"


def content(file: BinaryIO) -> bytes:
    with file:
        return file.read()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    return path


def test_a_link_to_the_outside_is_refused(model: Path, secret: Path) -> None:
    for target in (secret, "../secret", "./../secret", "/proc/self/environ", "../model/../secret"):
        (model / "file").unlink(missing_ok=True)
        (model / "file").symlink_to(target)
        with pytest.raises(ModelError, match=r"link to a file outside .*cp -L"):
            open_member(model / "file")


def test_a_folder_that_is_a_link_to_the_outside_is_refused(model: Path, secret: Path) -> None:
    (model / "1_Pooling").symlink_to("..")
    with pytest.raises(ModelError, match="link to a file outside"):
        open_member(model / "1_Pooling" / "secret", root=model)
    with pytest.raises(ModelError, match="link to a file outside"):
        open_member(model / ".." / "secret", root=model)


def test_links_inside_the_directory_are_followed(model: Path) -> None:
    (model / "sub").mkdir()
    (model / "sub" / "file").write_text("content")
    (model / "folder").symlink_to("sub")
    for name, target in {"a": "sub/file", "b": "./sub/../sub/file", "c": model / "sub" / "file", "d": "folder/file",
                         "e": "a", "f": "../model/sub/file"}.items():  # fmt: skip
        (model / name).symlink_to(target)
    for name in "abcde":
        assert content(open_member(model / name)) == b"content"
    assert content(open_member(model / "folder" / "file", root=model)) == b"content"
    with pytest.raises(
        ModelError, match="link to a file outside"
    ):  # the path leaves the directory, although it leads back into it
        open_member(model / "f")


def test_the_directory_itself_may_be_a_link(model: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(model)
    assert content(open_member(tmp_path / "link" / "config.json")) == (model / "config.json").read_bytes()
    assert list(open_shards(tmp_path / "link")) == list(open_shards(model))


def test_links_of_the_hub_cache_may_lead_only_to_its_blobs(tmp_path: Path, secret: Path) -> None:
    repository = tmp_path / "models--a--b"
    snapshot, blobs = repository / "snapshots" / "rev", repository / "blobs"
    (snapshot / "sub").mkdir(parents=True)
    blobs.mkdir()
    (blobs / "0123").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/0123")
    (snapshot / "sub" / "config.json").symlink_to("../../../blobs/0123")
    for root in (snapshot, snapshot / "sub"):
        assert content(open_member(root / "config.json")) == b"{}"
    (tmp_path / "models--c" / "blobs").mkdir(parents=True)
    (tmp_path / "models--c" / "blobs" / "0123").write_text(SECRET)
    for target in (secret, "../../../secret", "../../../models--c/blobs/0123"):
        (snapshot / "config.json").unlink()
        (snapshot / "config.json").symlink_to(target)
        with pytest.raises(ModelError, match="link to a file outside"):
            open_member(snapshot / "config.json")
    plain = tmp_path / "mine" / "snapshots" / "rev"  # not the hub's cache
    plain.mkdir(parents=True)
    (plain / "config.json").symlink_to("../../../secret")
    with pytest.raises(ModelError, match="link to a file outside"):
        open_member(plain / "config.json")


def test_a_file_that_a_person_names_may_be_a_link(tmp_path: Path, secret: Path) -> None:
    (tmp_path / "folder").mkdir()
    link = tmp_path / "folder" / "link"
    link.symlink_to(secret)
    assert content(open_file(link)).decode() == SECRET
    assert content(open_member(real_path(link))).decode() == SECRET


def test_a_link_swapped_in_while_files_are_opened_is_never_followed(model: Path, secret: Path) -> None:
    """Another thread keeps exchanging a file for a link."""
    (model / "innocent").write_text("innocent")
    stop = threading.Event()

    def swap() -> None:
        for round_ in iter(int, 1):
            if stop.is_set():
                return
            (model / "new").symlink_to("innocent" if round_ else secret)
            os.replace(model / "new", model / "file")
            shutil.copy(model / "innocent", model / "new")
            os.replace(model / "new", model / "file")

    (model / "file").write_text("innocent")
    swapper = threading.Thread(target=swap)
    swapper.start()
    refused = 0
    try:
        while refused < 20:
            try:
                data = content(open_member(model / "file"))
            except ModelError:
                refused += 1
            else:
                assert data == b"innocent"
    finally:
        stop.set()
        swapper.join()


READERS: dict[str, Callable[[Path], object]] = {
    "config.json": read_any_config,
    "generation_config.json": Tokenizer.from_dir,
    "tokenizer.json": Tokenizer.from_dir,
    "tokenizer_config.json": Tokenizer.from_dir,
    "special_tokens_map.json": Tokenizer.from_dir,
    "chat_template.jinja": Tokenizer.from_dir,
    "model.safetensors": open_checkpoint,
    "model.safetensors.index.json": open_shards,
    "scales.safetensors": kv_scales,
    "hf_quant_config.json": open_checkpoint,
    "modules.json": read_modules,
    "adapter_config.json": lambda d: read_adapter(d, open_checkpoint(d).config),
}


@pytest.mark.parametrize("name", READERS)
def test_every_reader_refuses_a_link_to_a_file_that_it_could_read(name: str, model: Path, tmp_path: Path) -> None:
    """The link leads to a valid file, so that the link is the only reason to refuse it."""
    outside = tmp_path / "outside"
    if (model / name).exists():
        (model / name).rename(outside)
    else:
        outside.write_text("{}")
    (model / name).symlink_to(outside)
    with pytest.raises(Fp8ServeError, match="link to a file outside"):
        READERS[name](model)


@pytest.mark.parametrize(
    "operation",
    [lambda d: estimate_weight_memory(d, "stored"), require_finite, model_digest],
    ids=["resident", "finite", "digest"],
)
def test_programs_that_only_look_at_weights_refuse_links_too(
    operation: Callable[[Path], object], model: Path, tmp_path: Path
) -> None:
    (model / "model.safetensors").rename(tmp_path / "outside")
    (model / "model.safetensors").symlink_to(tmp_path / "outside")
    with pytest.raises(ModelError, match="link to a file outside"):
        operation(model)


def test_a_pooling_folder_that_is_a_link_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    rows = [{"type": "m.Transformer", "path": ""}, {"type": "m.Pooling", "path": "1_Pooling"}]
    (model / "modules.json").write_text(json.dumps(rows))
    (model / "1_Pooling").symlink_to(tmp_path / "outside")
    with pytest.raises(ModelError, match="link to a file outside"):
        read_pooling(model)


def test_scales_that_a_person_names_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "scales.safetensors")
    link = tmp_path / "folder" / "scales.safetensors"
    link.symlink_to(tmp_path / "scales.safetensors")
    assert "a" in read_header(real_path(link))[0]
    with pytest.raises(Fp8ServeError, match="link to a file outside"):
        load_scales(link)


# Modules that may call functions that open files. Files of models, adapters and training checkpoints must be opened
# by `storage`; the modules listed here open other files.
OPENING = {"open", "read_text", "read_bytes", "safe_open", "load_file", "from_file", "from_pretrained", "memmap",
           "fromfile", "copyfile", "copytree", "GGUFReader", "BoundedReader"}  # fmt: skip
PARTS = ("model/**/*", "engine/**/*", "../calibrate/**/*", "train/**/*", "*.py", "server/serving/*",
         "server/finetuning/*")  # fmt: skip
OTHERS = {
    "../calibrate/output.py": "/proc",
    "../calibrate/reports/html.py": "the style sheet of the package",
    "doctor.py": "/proc",
    "running.py": "the log of a server that it started",
    "server/finetuning/backup.py": "the backup that a person named, and the file that it becomes",
    "server/finetuning/connections.py": "the job table, which the server makes",
    "server/finetuning/submission.py": "the rows of a request, and uploads, which the server wrote itself",
    "server/finetuning/job_runner.py": "what a job's process wrote",
    "model/export.py": "writes",
    "model/gguf/reader.py": "the GGUF file that a person named, whose kind `open_file` has checked",
    "engine/client.py": "/proc",
    "processes.py": "/proc",
    "engine/grammar.py": "the engine's own temporary file",
    "engine/weight_receiver.py": "the shared memory of a trainer",
    "train/events.py": "writes, and wandb's id, which the run wrote",
    "train/group.py": "the run's own processes",
    "train/trainer.py": "the rows of `finetune`, which it writes",
    "train/token_cache.py": "what the run wrote itself, by its digest; sources of this program",
    "train/methods/grpo/grading.py": "an address",
    "model/network/norms.py": "an embedding from a tensor",
    "model/storage": "the place itself",
}


def test_only_storage_opens_files_of_models() -> None:
    """A new call must use `storage.opening`, or be listed above with a reason."""
    home = Path(fp8serve.__file__).parent
    files = [file for part in PARTS for file in home.glob(part) if file.suffix == ".py"]
    opening = {os.path.relpath(file, home) for file in files if _opens(ast.parse(file.read_text(encoding="utf-8")))}
    others = {file for file in opening if file not in OTHERS and not file.startswith("model/storage/")}
    assert not others
    assert OTHERS.keys() - {"model/storage"} <= opening


def _opens(tree: ast.AST) -> bool:
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    named = {call.id for call in calls if isinstance(call, ast.Name)} & (OPENING - {"read_text"})
    return bool(named or {call.attr for call in calls if isinstance(call, ast.Attribute)} & OPENING)


def test_every_file_that_is_carried_over_is_read_there(model: Path, secret: Path, tmp_path: Path) -> None:
    from fp8serve.train.checkpoint import model_file_writer

    for name in COPIED_FILES:
        if name.endswith((".jinja", ".txt", ".model")):
            (model / name).unlink(missing_ok=True)
            (model / name).symlink_to(secret)
    with pytest.raises(ModelError, match="link to a file outside"):
        model_file_writer(model)
