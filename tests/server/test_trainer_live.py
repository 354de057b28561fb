"""Trainers in other processes send weights to a real server: its answers are then those of the same weights in a
directory, to the bit; a trainer that dies in the middle changes nothing."""

import importlib.util
import json
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fp8serve.engine.engine import Engine
from tests.engine.test_load_weights import write_fp8_model
from tests.engine.tiny import write_model
from tests.engine.trainer import TrainerGroup, infos_of, shared, tensors_in
from tests.patience import PATIENCE, until
from tests.server.process import ROOT, Process, serving

PROMPTS = [list(range(60)), [5, 250, 7, 7, 9, 100, 3]]
Answers = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trainer")
    for seed in range(2):
        write_model(path / f"bf16-{seed}", seed=seed)
        write_fp8_model(path / f"{seed}", seed)
    return path


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[Process]:
    with serving(place / "log", model=str(place / "0" / "fp8"), data_dir=str(place / "data")) as process:
        yield process
        assert process.stop() == 0
        assert "Traceback" not in process.log.read_text()


def answers(server: Process) -> Answers:
    body = {"prompt": PROMPTS, "max_tokens": 8, "temperature": 1.0, "seed": 3, "logprobs": 0, "ignore_eos": True}
    choices = server.client.post("/v1/completions", json=body | {"return_token_ids": True}).raise_for_status().json()
    return [(choice["token_ids"], choice["logprobs"]["token_logprobs"]) for choice in choices["choices"]]


def expected(directory: Path, **options: Any) -> Answers:
    completions = Engine(directory, **options).generate(
        PROMPTS, max_new_tokens=8, temperature=1.0, seed=3, logprobs=0, ignore_eos=True
    )
    return [(one.token_ids, [item.logprob for item in one.logprobs or ()]) for one in completions]


def train(server: Process, directory: Path, parts: int = 1, dies_after: int | None = None) -> subprocess.Popen[str]:
    options = {"url": server.url, "directory": str(directory), "parts": parts, "dies_after": dies_after}
    command = [sys.executable, "-m", "tests.server.trainer_process", json.dumps(options)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def noticed(server: Process) -> bool:
    """Whether no transfer runs any more."""
    answer = server.client.post("/destroy_weights_update_group")
    return answer.status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 4])
def test_weights_arrive_over_a_group(server: Process, place: Path, parts: int) -> None:
    for seed in (1, 0):
        with train(server, place / str(seed) / "fp8", parts) as trainer:
            output, _ = trainer.communicate(timeout=PATIENCE)
            assert trainer.returncode == 0
        lines = output.splitlines()
        assert (len(lines), set(lines[:-1])) == (parts, {"The tensors have arrived."} if parts > 1 else set())
        assert lines[-1].endswith("are served.")
        assert answers(server) == expected(place / str(seed) / "fp8")


@pytest.mark.slow
@pytest.mark.parametrize("dies_after", [0, 11])
def test_a_trainer_that_dies_in_the_middle_is_noticed(server: Process, place: Path, dies_after: int) -> None:
    before = answers(server)
    with train(server, place / "1" / "fp8", 2, dies_after) as trainer:
        assert trainer.wait(PATIENCE) == -9
    until(lambda: noticed(server), "the end of the transfer")
    assert answers(server) == before
    with train(server, place / "1" / "fp8") as trainer:
        assert trainer.wait(PATIENCE) == 0
    assert answers(server) == expected(place / "1" / "fp8")


def push(server: Process, place: Path, seed: int) -> dict[str, Any]:
    """Sends weights in shared memory and returns the body of the request."""
    tensors = tensors_in(place / str(seed) / "fp8")
    names, dtypes, shapes = zip(*infos_of(tensors), strict=True)
    info = {"names": names, "dtype_names": dtypes, "shapes": shapes}
    with shared(tensors) as name:
        body = {"update_info": info | {"shared_memory": name}, "weight_version": f"step-{seed}"}
        answer = server.client.post("/update_weights", json=body)
    assert answer.raise_for_status().json() == {"message": f"The weights base-step-{seed} are served."}
    return body


@pytest.mark.slow
def test_requests_are_answered_while_weights_arrive(server: Process, place: Path) -> None:
    push(server, place, 0)
    group, names = TrainerGroup("slow", "torch"), {"group_name": "slow"}
    address = {"master_address": "127.0.0.1", "master_port": group.port, "rank_offset": 1, "world_size": 2} | names
    info = {"names": ["model.norm.weight"], "dtypes": ["bfloat16"], "shapes": [[64]]} | names
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(server.client.post, "/init_weights_update_group", json=address | {"backend": "gloo"})
        group.connect()
        joining.result().raise_for_status()
        receiving = pool.submit(server.client.post, "/update_weights_from_distributed", json=info)
        until(lambda: not noticed(server), "the transfer")
        assert answers(server) == expected(place / "0" / "fp8")
        assert not receiving.done()
        group.end()
        refused = receiving.result()
    assert (refused.status_code, refused.json()["code"]) == (409, "load_failed")
    assert refused.json()["error"].startswith("The transfer failed: ")


@pytest.mark.slow
def test_weights_arrive_in_shared_memory(server: Process, place: Path) -> None:
    for seed in (0, 1):
        body = push(server, place, seed)
        assert answers(server) == expected(place / str(seed) / "fp8")
    refused = server.client.post("/update_weights", json=body)
    assert (refused.status_code, "cannot be opened: No such file" in refused.json()["error"]) == (409, True)
    assert answers(server) == expected(place / "1" / "fp8")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["keep", "abort"])
def test_a_request_in_flight_outlives_an_update_during_a_pause(server: Process, place: Path, mode: str) -> None:
    push(server, place, 0)
    body = {"prompt": [5, 250, 7], "max_tokens": 120, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    with ThreadPoolExecutor() as pool:
        running = pool.submit(server.client.post, "/v1/completions", json=body)
        until(lambda: server.client.get("/requests").json()["requests"], "the request")
        server.client.post("/pause", params={"mode": mode}).raise_for_status()
        push(server, place, 1)
        late = pool.submit(server.client.post, "/v1/completions", json=body)
        server.client.post("/resume").raise_for_status()
        (first,), (second,) = (future.result().raise_for_status().json()["choices"] for future in (running, late))
    assert len(first["token_ids"]) == 120 or first["finish_reason"] == "abort" == mode
    engine = Engine(place / "1" / "fp8")
    (expected_second,) = engine.generate([[5, 250, 7]], max_new_tokens=120, temperature=0.0, ignore_eos=True)
    assert second["token_ids"] == expected_second.token_ids
    assert answers(server) == expected(place / "1" / "fp8")


@pytest.mark.slow
def test_a_trainer_that_sends_nothing_misses_the_deadline(place: Path) -> None:
    options = {"model": str(place / "bf16-0"), "recipe": "bf16", "transfer_seconds": 0.1}
    with (
        serving(place / "log2", **options, data_dir=str(place / "data2")) as server,
        socket.create_server(("127.0.0.1", 0)) as port,
    ):
        address = {
            "master_address": "127.0.0.1",
            "master_port": port.getsockname()[1],
            "rank_offset": 1,
            "world_size": 2,
        }
        refused = server.client.post("/init_weights_update_group", json=address | {"backend": "gloo"})
        assert refused.status_code == 409
        reasons = ("The process group was not complete after 0.1 seconds.", "The transfer failed: ")
        assert refused.json()["error"].startswith(reasons)  # the first of two deadlines
        assert answers(server) == expected(place / "bf16-0", recipe="bf16")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_trl_uses_the_server_for_its_rollouts(place: Path) -> None:
    options = {"model": str(place / "bf16-0"), "recipe": "rowwise"}
    with serving(place / "log3", **options, data_dir=str(place / "data3")) as server:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        out = place / "policy"
        arguments = {"url": server.url, "port": port, "model": str(place / "bf16-0"), "out": str(out)}
        command = [sys.executable, "-m", "tests.server.trl_trainer", json.dumps(arguments)]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
        assert run.returncode == 0, run.stderr
        result = json.loads(run.stdout.splitlines()[-1])
        assert result["difference"] < 1  # between FP8 and BF16
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(place / "bf16-0" / name, out / name)
        completions = Engine(out, recipe="rowwise").generate(
            result["after"]["prompt_ids"], max_new_tokens=12, temperature=0.0, logprobs=0, ignore_eos=True
        )
        for key in ("after", "again"):
            assert result[key]["completion_ids"] == [one.token_ids for one in completions]
            served = [[values[0] for values in row] for row in result[key]["logprobs"]]
            assert served == [[item.logprob for item in one.logprobs or ()] for one in completions]
        before = Engine(place / "bf16-0", recipe="rowwise").generate(
            result["after"]["prompt_ids"], max_new_tokens=12, temperature=0.0, ignore_eos=True
        )
        assert [one.token_ids for one in before] != result["after"]["completion_ids"]
