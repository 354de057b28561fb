"""Untrusted model directories: whatever a file contains, reading it gives a model or one sentence, within seconds.

The tests put values of every wrong type at every key of every JSON file. A test that hangs ends at the suite's limit,
which guards against hangs only: nothing here measures time.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fp8serve
from fp8serve.calibration.pipeline import calibrate
from fp8serve.errors import DataError, Fp8ServeError, ModelError
from fp8serve.model.checkpoint import kv_scales, open_checkpoint
from fp8serve.model.config.decoder import parse_config, read_config
from fp8serve.model.config.families import FAMILIES
from fp8serve.model.formats.interop import read_quantization
from fp8serve.model.storage.files import read_json
from fp8serve.model.text.examples import read_examples
from fp8serve.model.text.tokenizer import Tokenizer
from tests.model.oracle import REQUIRED
from tests.tiny import write_tiny_model

CATASTROPHE = "re:(.+)+!"
WRONG: list[Any] = [
    None, True, 5, 0, -1, 10**9, 10**30, 10**400, 1e300, float("nan"), float("inf"), "", "text", "two\nlines", "\ud800",
    "x" * 100_000, "re:(", CATASTROPHE, [], [[]], [5], ["re:("], [CATASTROPHE], ["\ud800"], ["Linear"] * 20_000,
    ["re:x"] * 1_000, ["re:" + "(a{900}){900}"], {}, {"a": 1}, [{}], [None], {"x" * 100_000: 1},
]  # fmt: skip
# keys of individual families
UNREAD = ("use_sliding", "sliding", "max_window", "layer_types", "attention_bias", "mlp_bias")
WHOLE = [
    "",
    "[]",
    "5",
    "null",
    "{",
    "[" * 100_000,
    '{"a": 1, "a": 2}',
    "\ufeff{}",
    "\udcff",
    "9" * 9999,
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("hostile") / "model")


@pytest.fixture(scope="module")
def directories(plain: Path) -> dict[str, Path]:
    """The same model in every format."""
    formats = {"plain": plain}
    for form in ("compressed-tensors", "fp8", "modelopt"):
        formats[form] = plain.parent / form
        kv_cache = form != "fp8"
        calibrate(plain, out=formats[form], samples=2, seq_len=16, format=form, kv_cache=kv_cache)  # type: ignore[arg-type]
    return formats


@pytest.fixture
def damaged_copy(directories: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """Returns a function that copies a directory, which the test may then damage."""
    return lambda form: Path(shutil.copytree(directories[form], tmp_path / form))


def use_model(directory: Path) -> None:
    """Loads the model, generates, and reads tokenizer, chat template and cache scales."""
    engine = fp8serve.Engine(directory, recipe="bf16" if not (directory / "scales.safetensors").exists() else "stored")
    engine.generate(["Once"], max_new_tokens=2)
    tokenizer = Tokenizer.from_dir(directory)
    tokenizer.encode("Once upon a time")
    if tokenizer.has_chat_template:
        tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    kv_scales(directory)


def schemes(directory: Path, document: dict[str, Any]) -> None:
    """Parses the quantization of every layer from the configuration alone."""
    quantization = read_quantization(directory, document)
    for layer in range(4):
        if quantization is not None:
            quantization.require_scheme(f"model.layers.{layer}.self_attn.q_proj")


def read_small_files(directory: Path) -> None:
    read_config(directory)
    tokenizer = Tokenizer.from_dir(directory)
    if tokenizer.has_chat_template:
        tokenizer.encode_chat([{"role": "user", "content": "Hello"}])


def checked_message(error: Fp8ServeError) -> str:
    """Asserts that the message is one printable line that ends with a full stop. Returns it."""
    message = str(error)
    assert "\n" not in message
    assert message.endswith(".")
    assert len(message) < 1000
    message.encode()
    return message


def outcome(attempt: Callable[[], object], label: str) -> str | None:
    """Returns the sentence with which `attempt` was refused, or None. Any other exception fails the test."""
    try:
        attempt()
    except Fp8ServeError as e:
        return checked_message(e)
    except Exception as e:
        raise AssertionError(f"{label}: {type(e).__name__}: {e}") from e
    return None


def json_paths(value: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if at:
        yield at
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from json_paths(inner, (*at, key))


def replaced(document: Any, place: tuple[str | int, ...], value: Any) -> Any:
    copy = json.loads(json.dumps(document))
    inner = copy
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return copy


@pytest.mark.slow
def test_wrong_values_of_every_key_of_config_json() -> None:
    """Tests the parser alone, without weights, with all keys that any family reads."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2}  # fmt: skip
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "mscale": 1.0,
            "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1, "attention_factor": 1.0, "truncate": True,
            "rope_theta": 1e4, "partial_rotary_factor": 1.0}  # fmt: skip
    long = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 1e4,
            "original_max_position_embeddings": 64, "attention_factor": 1.0, "factor": 2.0}  # fmt: skip
    refused = 0
    for kind, family in FAMILIES.items():
        defaults = {k: v for k, v in family.defaults.items() if k in family.optional or not k.startswith(UNREAD)}
        defaults.pop("rope_parameters", None)  # must not contradict rope_scaling
        if family.mixture:
            defaults = REQUIRED.get(kind, {"num_experts_per_tok": 2}) | defaults
        base = {**defaults, **sizes, "model_type": kind, "architectures": [family.architecture],
                "rope_scaling": long if family.rope_aliases else yarn, "rope_theta": 1e4,
                "dtype": "bfloat16"}  # fmt: skip
        assert parse_config(base).num_layers == 2
        for place in json_paths(base):
            for value in WRONG:
                document = replaced(base, place, value)
                refused += outcome(lambda d=document: parse_config(d), f"{kind}: {place} = {value!r:.60}") is not None  # type: ignore[misc]
    assert refused > 1000


@pytest.mark.smoke
@pytest.mark.parametrize("size", ["num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size", "head_dim"])
@pytest.mark.parametrize("value", [10**9, 10**30])
def test_an_impossible_size_is_refused_before_allocating(
    size: str, value: int, damaged_copy: Callable[[str], Path]
) -> None:
    directory = damaged_copy("plain")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {size: value}))
    with pytest.raises(ModelError, match=f"{size} is {value} where at most [0-9]+ was expected"):
        use_model(directory)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["compressed-tensors", "fp8", "modelopt"])
def test_wrong_values_of_every_key_of_quantization_config(form: str, damaged_copy: Callable[[str], Path]) -> None:
    directory = damaged_copy(form)
    document = read_json(directory / "config.json")
    keys = {"quantization_config": document["quantization_config"]}
    assert outcome(lambda: use_model(directory), form) is None
    for place in json_paths(keys):
        for value in WRONG:
            spoiled_keys = replaced(keys, place, value)
            outcome(lambda d=spoiled_keys: schemes(directory, d), f"{form}: {place} = {value!r:.60}")  # type: ignore[misc]


@pytest.mark.parametrize("target", [5, "Linear", ["re:("], ["re:^(?!x)y"], [CATASTROPHE], [5]])
def test_targets_that_name_no_layers_are_refused(target: Any, damaged_copy: Callable[[str], Path]) -> None:
    directory = damaged_copy("compressed-tensors")
    document = read_json(directory / "config.json")
    document["quantization_config"]["config_groups"]["group_0"]["targets"] = target
    (directory / "config.json").write_text(json.dumps(document))
    assert outcome(lambda: use_model(directory), str(target)) is not None


EXTRA: dict[str, dict[str, Any]] = {
    "generation_config.json": {"eos_token_id": [1, 2], "bos_token_id": 1, "temperature": 0.5},
    "tokenizer_config.json": {
        "bos_token": "<s>",
        "add_bos_token": True,
        "chat_template": [{"name": "default", "template": "{{ messages }}"}],
    },
    "special_tokens_map.json": {"bos_token": {"content": "<s>"}, "eos_token": "</s>"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXTRA)
def test_wrong_values_of_every_key_of_the_small_files(name: str, damaged_copy: Callable[[str], Path]) -> None:
    directory = damaged_copy("compressed-tensors")
    document = EXTRA[name]
    for place in json_paths(document):
        for value in WRONG:
            (directory / name).write_text(json.dumps(replaced(document, place, value)))
            outcome(lambda: read_small_files(directory), f"{name}: {place} = {value!r:.60}")


@pytest.mark.smoke
def test_wrong_values_of_every_key_of_an_index(damaged_copy: Callable[[str], Path]) -> None:
    from safetensors import safe_open

    directory = damaged_copy("plain")
    (directory / "model.safetensors").rename(directory / "model-1.safetensors")
    with safe_open(directory / "model-1.safetensors", "pt") as file:
        weight_map = dict.fromkeys(file.keys(), "model-1.safetensors")
    index = {"metadata": {"total_size": 5}, "weight_map": weight_map}
    path = directory / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    use_model(directory)
    some = [p for p in json_paths(index) if p[0] != "weight_map" or p[-1] in ("weight_map", "model.norm.weight")]
    for place in some:
        for value in [*WRONG, "../model-1.safetensors", "/dev/zero", "\0.safetensors", "none.safetensors"]:
            path.write_text(json.dumps(replaced(index, place, value)))
            message = outcome(lambda: open_checkpoint(directory), f"{place} = {value!r:.60}")
            assert message is not None or place[0] == "metadata"


NAMES = (*EXTRA, "config.json", "tokenizer.json", "chat_template.jinja", "hf_quant_config.json", "scales.safetensors",
         "model.safetensors", "model.safetensors.index.json")  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in NAMES if n.endswith(".json")])
def test_files_that_are_no_json_object(name: str, damaged_copy: Callable[[str], Path]) -> None:
    directory = damaged_copy("compressed-tensors")
    if name == "model.safetensors.index.json":
        (directory / "model.safetensors").unlink()
    if name == "hf_quant_config.json":
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    for whole in WHOLE:
        (directory / name).write_bytes(whole.encode("utf-8", "surrogateescape"))
        message = outcome(lambda: use_model(directory), f"{name}: {whole[:20]!r}")
        assert message is not None or whole == "\ufeff{}"  # a byte-order mark is allowed


def fifo(path: Path) -> None:
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.mkdir()


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def dangling(path: Path) -> None:
    path.symlink_to("nothing")


def terabyte(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


def nothing(path: Path) -> None:
    path.touch()


ODD = [fifo, directory, device, loop, dangling, terabyte, nothing]


@pytest.mark.slow
@pytest.mark.parametrize("make", ODD, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_special_files_in_a_model_directory(
    make: Callable[[Path], None], name: str, damaged_copy: Callable[[str], Path]
) -> None:
    model = damaged_copy("compressed-tensors")
    if name == "model.safetensors.index.json":
        (model / "model.safetensors").unlink()
    if name == "hf_quant_config.json":
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    (model / name).unlink(missing_ok=True)
    make(model / name)
    message = outcome(lambda: use_model(model), name)
    if (make, name) != (nothing, "chat_template.jinja"):  # an empty template is valid
        assert message is not None
        assert name in message


@pytest.mark.smoke
@pytest.mark.parametrize("make", ODD, ids=lambda f: f.__name__)
@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_special_files_as_data(make: Callable[[Path], None], suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"data{suffix}"
    make(path)
    with pytest.raises(DataError) as refused:
        list(read_examples([path]))
    assert path.name in checked_message(refused.value)


@pytest.mark.smoke
def test_data_rows_of_wrong_types_are_read_or_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    message = {"role": "assistant", "content": "Yes", "weight": 1}
    rows = [{"text": "a"}, {"prompt": "a", "completion": "b"}, {"messages": [message]}]
    for original, at in [(row, place) for row in rows for place in json_paths(row)]:
        for value in WRONG:
            path.write_text(json.dumps(replaced(original, at, value)) + "\n")
            outcome(lambda: list(read_examples([path])), f"{at} = {value!r:.60}")
