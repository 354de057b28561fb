"""The benchmark of mixtures of experts: the model that it writes, and a run without installed peers."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks import experts
from fp8serve.model.gguf.reader import GgufFile

SIZES = (8, 1, 64)  # experts, layers, hidden


def test_the_model_is_made_once_in_both_formats(tmp_path: Path) -> None:
    experts.make(tmp_path, *SIZES)
    file = tmp_path / "model.gguf"
    modified_ns = file.stat().st_mtime_ns
    assert GgufFile(file).require("qwen3moe.expert_count", int) == 8
    experts.make(tmp_path, *SIZES)
    assert file.stat().st_mtime_ns == modified_ns
    with pytest.raises(SystemExit, match="was made with another num_experts; give another folder"):
        experts.make(tmp_path, 16, 1, 64)


def test_the_error_names_a_peer_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(SystemExit, match="has no llama_cpp; install it there"):
        experts.main(["llama", "model.gguf", "BF16", "1"])


def test_one_run_prints_one_json_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(arguments: list[str]) -> int:
        out = Path(arguments[arguments.index("--out") + 1])
        (out / "peers-2026-01-02.json").write_text(json.dumps({"rows": [1]}))
        print("a table", f"written: {out / 'peers-2026-01-02.json'}", sep="\n")
        return 1

    monkeypatch.setattr("runpy.run_path", lambda path: {"main": measured})
    sizes = [f"--{name}={size}" for name, size in zip(("experts", "layers", "hidden"), SIZES, strict=True)]
    status = experts.main([str(tmp_path / "d"), "--python", sys.executable, "--out", str(tmp_path / "out"), *sizes])
    captured = capsys.readouterr()
    assert status == 1
    assert json.loads(captured.out)["rows"] == [1]
    assert json.loads(captured.out)["model"]["num_experts"] == 8
    assert "a table" in captured.err
    assert json.loads((tmp_path / "out/experts-2026-01-02.json").read_text()) == json.loads(captured.out)
