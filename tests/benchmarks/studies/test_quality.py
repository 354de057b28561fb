"""A small quality study: methods, a directory, a program as a peer; intervals; and refusals."""

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.studies import quality
from benchmarks.studies.__main__ import main
from benchmarks.studies.documents import intervals
from benchmarks.studies.quality import QualityOptions
from benchmarks.studies.quality_chart import chart
from fp8serve.calibration.measure import TokenTally
from fp8serve.errors import JobError
from fp8serve.model.config.decoder import read_config
from tests.tiny import write_tiny_model

SMALL = {"samples": 8, "measured": 12, "seq_len": 32, "new": 2}
PEER = """
import json, sys
import numpy as np
vocabulary = int(sys.argv[1])
print("a library says hello", flush=True)
print(json.dumps({"bytes": 1000, "name": "uniform"}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if "logits" in request:
        np.save(request["logits"], np.zeros((len(request["ids"]), vocabulary), np.float32))
        print("{}", flush=True)
    else:
        print(json.dumps({"tokens_per_second": float(request["new"])}), flush=True)
"""


def quiet(what: str, completed: int, of: int) -> None:
    pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("quality") / "model")


def program(folder: Path, text: str, *arguments: object) -> str:
    file = folder / "peer.py"
    file.write_text(text)
    return shlex.join([sys.executable, str(file), *map(str, arguments)])


def test_every_method_a_directory_and_a_program_side_by_side(model: Path, tmp_path: Path) -> None:
    vocabulary = read_config(model).vocab_size
    first = quality.study(model, tmp_path, QualityOptions(methods=("static", "w8a16"), **SMALL), quiet)  # type: ignore[arg-type]
    assert [row["name"] for row in first["rows"]] == ["bf16", "static", "w8a16"]
    assert first["rows"][0]["figures"] == {}
    static = first["rows"][1]
    assert static["bytes"] < first["rows"][0]["bytes"]
    assert all(row["tokens_per_second"] > 0 for row in first["rows"])
    assert first["text"]["documents"] == 12
    modified_ns = (tmp_path / "static" / "calibration.json").stat().st_mtime_ns
    peers = (f"again={tmp_path / 'static'}", f"uniform={program(tmp_path, PEER, vocabulary)}")
    second = quality.study(model, tmp_path, QualityOptions(methods=("static",), peers=peers, **SMALL), quiet)  # type: ignore[arg-type]
    assert (tmp_path / "static" / "calibration.json").stat().st_mtime_ns == modified_ns  # not made again
    _, static_again, again, uniform = second["rows"]
    assert static_again["figures"] == again["figures"] == static["figures"]
    assert uniform["bytes"] == 1000
    assert uniform["tokens_per_second"] == SMALL["new"]
    assert uniform["figures"]["kl"]["value"] > static["figures"]["kl"]["value"]
    assert chart(second, ["again", "uniform"]).count("<circle") == 3
    with pytest.raises(JobError, match="other settings"):
        quality.study(model, tmp_path, QualityOptions(methods=("static",), **SMALL | {"samples": 9}), quiet)  # type: ignore[arg-type]


def test_a_peer_that_fails_costs_no_other_row(model: Path, tmp_path: Path) -> None:
    stages: list[str] = []

    def report(what: str, completed: int, of: int) -> None:
        stages.append(what)

    options = QualityOptions(methods=("static",), **SMALL | {"new": 0})  # type: ignore[arg-type]
    with pytest.raises(JobError, match="other"):
        quality.study(model, tmp_path, replace(options, peers=("other=/no/such/program",)), report)
    assert {*stages} == {"static: calibrate", "static"}
    stages.clear()
    first = quality.study(model, tmp_path, options, report)
    assert stages == []
    os.utime(tmp_path / "static" / "model.safetensors")
    assert quality.study(model, tmp_path, options, report)["rows"] == first["rows"]
    assert {*stages} == {"static"}  # measured again: it might have been another one


def test_what_is_measured_is_not_calibrated_on(tmp_path: Path) -> None:
    data, held_out = quality._texts(tmp_path, QualityOptions())
    one, other = (set(Path(files[0]).read_text().splitlines()) for files in (data, held_out))
    assert one
    assert other
    assert not one & other
    with pytest.raises(JobError, match="neither"):
        QualityOptions(data=(str(tmp_path / "calibrate.jsonl"),))


def test_intervals_hold_the_figure_and_narrow_with_documents() -> None:
    generator = torch.Generator().manual_seed(0)

    def tallies(count: int) -> list[TokenTally]:
        values = torch.rand(count, generator=generator).tolist()
        return [TokenTally(100, 300 + 10 * v, 300, 2 * v, int(100 - 10 * v)) for v in values]

    few, many = intervals(tallies(10)), intervals(tallies(1000))
    for figures in (few, many):
        for figure in figures.values():
            assert figure.low < figure.value < figure.high
    assert many["kl"].value == pytest.approx(0.01, rel=0.1)
    assert many["perplexity_percent"].value == pytest.approx(5.1, rel=0.1)
    assert many["kl"].high - many["kl"].low < 0.3 * (few["kl"].high - few["kl"].low)
    alike = intervals([TokenTally(10, 30.0, 30.0, 0.5, 9)] * 5)["kl"]
    assert (alike.low, alike.high) == pytest.approx((0.05, 0.05))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("raise SystemExit('no weights here')", "status 1: no weights here"),
        ("print('{}', flush=True); input(); print('{}', flush=True); input()", "no logits that can be read"),
        (PEER.replace("len(request['ids'])", "3").replace('len(request["ids"])', "3"), "logits .* for"),
    ],
)
def test_the_error_names_the_peer_that_failed(text: str, sentence: str, model: Path, tmp_path: Path) -> None:
    peer = f"other={program(tmp_path, text, read_config(model).vocab_size)}"
    with pytest.raises(JobError, match=f"The peer other .*{sentence}"):
        quality.study(model, tmp_path, QualityOptions(methods=(), peers=(peer,), **SMALL | {"new": 0}), quiet)  # type: ignore[arg-type]


@pytest.mark.parametrize("peer", ["=x", "name", "name="])
def test_a_peer_without_a_name_or_a_place_is_refused(peer: str, model: Path, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="NAME=DIRECTORY"):
        quality.study(model, tmp_path, QualityOptions(methods=(), peers=(peer,), **SMALL), quiet)  # type: ignore[arg-type]


def test_a_peer_that_cannot_be_started_is_refused(model: Path, tmp_path: Path) -> None:
    options = QualityOptions(methods=(), peers=("other=/no/such/program",), **SMALL)  # type: ignore[arg-type]
    with pytest.raises(JobError, match="The peer other cannot be started"):
        quality.study(model, tmp_path, options, quiet)


def test_methods_that_do_not_exist_are_refused() -> None:
    with pytest.raises(JobError, match="no method 'int4'; choose from static, "):
        QualityOptions(methods=("int4",))


def test_the_command_writes_figures_and_a_picture(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["quality", str(model), "--out", str(tmp_path), "--method", "static", "--samples", "8"]
    assert main([*arguments, "--measured", "8", "--seq-len", "32", "--new", "0"]) == 0
    output = capsys.readouterr().out
    assert "KL, nats" in output
    assert "static" in output
    report: dict[str, Any] = json.loads((tmp_path / "quality.json").read_text())
    assert [row["name"] for row in report["rows"]] == ["bf16", "static"]
    assert (tmp_path / "quality-methods.svg").read_text().startswith("<svg")
