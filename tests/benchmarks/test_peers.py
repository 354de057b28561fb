"""Peers take turns with fp8serve, the best round counts, and a peer that fails does not end the others."""

import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

PEERS: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks/peers.py"))
TOML = """
[[peer]]
name = "Q8"
command = ["q8", "{batch}"]
batch = [1, 8]
goal = { prefill = 2.0, "1" = 1.15, "8" = 3 }

[[peer]]
name = "broken"
command = ["broken", "now"]
batch = [8]
"""


def engine(prefill: float, decode: float) -> str:
    """Returns the relevant part of the output of `bench engine --json`."""
    figures = {"model": {}, "prefill": {"tokens_per_second": prefill}, "decode": [{"tokens_per_second": decode}]}
    return json.dumps(figures, indent=1)


class Fake:
    """Simulates programs whose speed rises by one token per second with each run."""

    def __init__(self) -> None:
        self.started: list[str] = []

    def __call__(self, command: Sequence[str]) -> str:
        if command[0] == "broken":
            self.started.append("broken")
            raise PEERS["PeerError"]("ended with status 1")
        batch, times = int(command[command.index("8")] if "8" in command else 1), len(self.started)
        self.started.append(f"{'q8' if command[0] == 'q8' else 'ours'} {batch}")
        if command[0] == "q8":
            return f"noise\nQ8 batch {batch}: prefill 100.0 tok/s, decode {10 * batch + times} tok/s (20 ms)\nbye\n"
        return engine(250.0, 20.0 * batch + times)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("a 1\nvllm bf16 batch 8: prefill 242.0 tok/s, decode 119.25 tok/s (step 8 ms)\n", (242.0, 119.25)),
        ('loading\n{"decode": 7, "prefill": 6.5, "more": 1}\nbye', (6.5, 7.0)),
        ('{"decode": 7}', (None, 7.0)),
        ('{"prefill": 6.5, "decode": 7}\nINFO closing\n', (6.5, 7.0)),
        ('{"decode": 3}\n{"level": "info", "decode": {}}\nbatch 1: decode 7.0 tok/s\n{not JSON\n', (None, 7.0)),
        ('{\n "decode": 7\n}\nINFO closing\n', (None, 7.0)),
        (engine(406.0, 36.3), (406.0, 36.3)),
        (engine(406.0, 36.3).replace("\n", "") + "\nINFO closing\n", (406.0, 36.3)),
    ],
)
def test_speeds_are_those_of_the_last_line_with_figures_or_of_a_json_document(
    output: str, expected: tuple[float | None, float | None]
) -> None:
    speeds = PEERS["speeds"](output)
    assert (speeds.get("prefill"), speeds.get("decode")) == expected


def test_a_program_that_prints_no_speed_is_an_error() -> None:
    with pytest.raises(PEERS["PeerError"], match="no speed; its last words: 'all is well'"):
        PEERS["speeds"]("all is well\n")


def test_rounds_alternate_and_the_best_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "peers.toml").write_text(TOML)
    fake = Fake()
    status = PEERS["main"](["model", str(tmp_path / "peers.toml"), "--rounds", "2", "--out", str(tmp_path)], run=fake)
    one_round = ["ours 1", "q8 1", "ours 8", "q8 8"]
    assert fake.started == [*one_round, "broken", *one_round]  # a failed peer is not started again
    assert status == 1
    printed = capsys.readouterr()
    assert "broken gave no figures: batch 8: ended with status 1" in printed.err
    (path,) = tmp_path.glob("peers-*.json")
    rows = {(row["peer"], row["work"]): row for row in json.loads(path.read_text())["rows"]}
    assert rows["Q8", "8"] == {
        "peer": "Q8", "work": "8", "ours": 167.0, "ours_worst": 162.0, "theirs": 88.0, "theirs_worst": 83.0,
        "ratio": pytest.approx(167 / 88), "goal": 3, "met": False,
    }  # fmt: skip
    assert rows["Q8", "prefill"]["ratio"] == 2.5
    assert rows["Q8", "prefill"]["met"]
    text = path.with_suffix(".md").read_text()
    assert "| prefill | Q8 | 250.0 (250.0) | 100.0 (100.0) | 2.50 | 2 reached |" in text
    assert "| decode, batch 8 | Q8 | 167.0 (162.0) | 88.0 (83.0) | 1.90 | 3 **not reached** |" in text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("peer = 3 3", "not TOML"),
        ('[[peer]]\nname = "x"\nbatch = [1]\n', "x: needs a name, a command"),
        ('[[peer]]\nname = "x"\ncommand = ["a"]\nbatch = [1]\nspeed = 3\n', r"\['speed'\] means nothing"),
        ('[[peer]]\nname = "x"\ncommand = ["a"]\nbatch = [1]\ngoal = {"8" = 2}\n', r"not \['8'\]"),
    ],
)
def test_an_invalid_file_of_peers_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(PEERS["PeerError"], match=complaint):
        PEERS["read_peers"](text)


def test_a_real_command() -> None:
    assert PEERS["start"]([sys.executable, "-c", "print('decode 3 tok/s')"]) == "decode 3 tok/s\n"
    with pytest.raises(PEERS["PeerError"], match="status 3: 'sorry'"):
        PEERS["start"]([sys.executable, "-c", "import sys; print('sorry', file=sys.stderr); sys.exit(3)"])
    with pytest.raises(PEERS["PeerError"], match="No such file"):
        PEERS["start"](["/nowhere/at/all"])


def test_published_commands_name_no_place() -> None:
    assert PEERS["without_paths"](["/usr/bin/python3", "x.py", "/models/1b", "{batch}"]) == [
        "python3",
        "x.py",
        "1b",
        "{batch}",
    ]
