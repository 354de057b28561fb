"""Weights from a trainer and pauses of generation, by the routes of vLLM and of SGLang, on fake engines."""

import asyncio
import json
from typing import Any

import pytest

from fp8serve.errors import GroupError
from fp8serve.server.named_models import NamedAdapter
from tests.patience import eventually
from tests.server.conftest import Server, Start
from tests.server.fakes import Launcher
from tests.server.serving.test_swap_in_place import SwappingEngine

GROUP = {"master_address": "127.0.0.1", "master_port": 51216, "rank_offset": 1, "world_size": 2}


class Engine(SwappingEngine):
    """An engine that counts exchanges of received weights."""

    async def stage_received_weights(self, allow_incomplete: bool) -> str | None:
        digest = await super().stage_received_weights(allow_incomplete)
        self.staged = [] if digest is None else [None]
        return digest

    async def swap_weights(self) -> None:
        if self.running and self.resumed.is_set():
            await super().swap_weights()  # which refuses
        self.swaps.append(None)
        if self.problem is not None:
            problem, self.problem = self.problem, None
            raise problem


def update(*names: str, **more: Any) -> dict[str, Any]:
    info = {"names": names, "dtype_names": ["bfloat16"] * len(names), "shapes": [[2, 3]] * len(names)}
    return {"update_info": info | more}


async def post(server: Server, path: str, body: Any = None, status: int = 200) -> Any:
    answer = await server.client.post(path, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


async def complete(server: Server, tokens: int = 3) -> Any:
    return await server.client.post("/v1/completions", json={"prompt": "abc", "max_tokens": tokens})


async def version(server: Server) -> str:
    return str((await complete(server)).json()["system_fingerprint"])


async def test_an_update_by_the_routes_of_vllm(start: Start) -> None:
    async with start(Launcher(Engine), transfer_seconds=7) as server:
        engine, before = server.launcher.engine, await version(server)
        assert (await server.client.get("/get_world_size")).json() == {"world_size": 1}
        await post(server, "/init_weight_transfer_engine", {"init_info": GROUP})
        assert engine.calls[-1] == (
            "join_group",
            {"name": "weight_transfer", "host": "127.0.0.1", "port": 51216, "rank": 1, "world_size": 2,
             "backend": "gloo", "rendezvous": "vllm", "packed_bytes": None},
            7,
        )  # fmt: skip
        await post(server, "/start_weight_update", {})
        await post(server, "/update_weights", update("a", packed=True, packed_buffer_size_bytes=9))
        assert engine.calls[-1] == ("receive_weights", "weight_transfer", [("a", "bfloat16", [2, 3])], 9, 7)
        await post(server, "/update_weights", update("b"))
        assert engine.calls[-1][3] is None
        assert (engine.swaps, await version(server)) == ([], before)
        answer = await post(server, "/finish_weight_update", {"weight_version": "step-3"})
        assert answer == {"message": "The weights base-step-3 are served."}
        assert (engine.swaps, await version(server)) == ([None], "base-step-3")
        refused = await post(server, "/finish_weight_update", status=409)
        assert refused["error"] == "No update was started, so the weights are those from before."
        await post(server, "/reset_prefix_cache")
        assert engine.calls[-1] == ("reset_prefix_cache",)


async def test_an_update_that_was_not_started_ends_with_the_last_weight(start: Start) -> None:
    async with start(Launcher(Engine)) as server:
        engine, before = server.launcher.engine, await version(server)
        assert (await post(server, "/update_weights", update("a")))["message"] == "The tensors have arrived."
        assert await version(server) == before
        assert (await post(server, "/update_weights", update("b", shared_memory="x")))["message"].endswith(
            "are served."
        )
        assert engine.calls[-1] == ("read_shared_weights", "x", [("b", "bfloat16", [2, 3])])
        assert (engine.swaps, await version(server)) == ([None], "base-0123456789ab")


async def test_an_update_by_the_routes_of_sglang(start: Start) -> None:
    async with start(Launcher(Engine)) as server:
        engine = server.launcher.engine
        await post(server, "/init_weights_update_group", GROUP | {"group_name": "g", "backend": "gloo"})
        assert engine.calls[-1][1] | {"name": "g", "rendezvous": "torch", "backend": "gloo"} == engine.calls[-1][1]
        await post(server, "/pause_generation", {"mode": "abort"})
        assert (await server.client.get("/flush_cache")).json()["success"] is True
        tensors = {"names": ["a"], "dtypes": ["torch.float32"], "shapes": [[]], "group_name": "g"}
        first = await post(server, "/update_weights_from_distributed", tensors | {"flush_cache": False})
        assert first == {"success": True, "message": "The tensors have arrived."}
        assert engine.calls[-1][1:4] == ("g", [("a", "float32", [])], None)
        last = tensors | {"names": ["b"], "load_format": "flattened_bucket", "weight_version": "7"}
        assert (await post(server, "/update_weights_from_distributed", last))["message"].endswith("base-7 are served.")
        assert engine.calls[-1][3] > 1 << 60
        await post(server, "/continue_generation", {})
        assert await version(server) == "base-7"
        await post(server, "/destroy_weights_update_group", {"group_name": "g"})
        assert engine.calls[-1] == ("leave_group", "g")


async def test_a_failed_update_leaves_the_old_weights(start: Start) -> None:
    async with start(Launcher(Engine)) as server:
        engine, before = server.launcher.engine, await version(server)
        await post(server, "/start_weight_update")
        engine.transfer_problem = GroupError("The transfer failed: Connection closed by peer.")
        refused = await post(server, "/update_weights", update("a"), 409)
        assert refused["error"] == "The transfer failed: Connection closed by peer."
        engine.transfer_problem = None
        refused = await post(server, "/finish_weight_update", {}, 409)
        assert (refused["code"], "The update lacks the tensor b" in refused["error"]) == ("load_failed", True)
        engine.problem = GroupError("No memory.")
        refused = await post(server, "/update_weights", update("a", "b"), 409)
        assert refused["error"] == "The weights cannot be exchanged: No memory."
        assert await version(server) == before
        await post(server, "/update_weights", update("a", "b"))
        assert await version(server) != before


async def test_an_update_that_failed_is_not_reported_as_finished(start: Start) -> None:
    async with start(Launcher(Engine)) as server:
        await post(server, "/start_weight_update")
        await post(server, "/update_weights", update("a"))
        await post(server, "/finish_weight_update", status=409)
        refused = await post(server, "/finish_weight_update", status=409)
        assert (refused["code"], refused["error"][:22]) == ("load_failed", "No update was started,")
        assert server.launcher.engine.swaps == []


@pytest.mark.parametrize("event", ["the next trainer joins", "the engine restarts", "the next trainer uses SGLang's"])
async def test_an_update_that_is_never_finished_keeps_no_later_one_open(start: Start, event: str) -> None:
    async with start(Launcher(Engine)) as server:
        await post(server, "/start_weight_update")
        if event == "the next trainer joins":
            await post(server, "/init_weight_transfer_engine", {"init_info": GROUP})
        if event == "the engine restarts":
            engine = server.launcher.engine
            await engine.kill("It died.")
            await eventually(lambda: server.launcher.engine is not engine and server.state.models.default.ready)
        if event == "the next trainer uses SGLang's":
            tensors = {"names": ["a", "b"], "dtypes": ["float32"] * 2, "shapes": [[], []]}
            answer = await post(server, "/update_weights_from_distributed", tensors)
        else:
            answer = await post(server, "/update_weights", update("a", "b"))
        assert answer["message"].endswith("are served.")
        assert len(server.launcher.engine.swaps) == 1


async def test_weights_that_generate_nothing_are_exchanged_again(start: Start) -> None:
    class Mute(Engine):
        async def swap_weights(self) -> None:
            await super().swap_weights()
            self.fail = "The logits are not finite." if len(self.swaps) == 1 else None

        async def _outputs(self, request: Any) -> Any:
            if self.fail is not None:
                raise GroupError(self.fail)
            async for output in super()._outputs(request):
                yield output

    async with start(Launcher(Mute)) as server:
        before = await version(server)
        refused = await post(server, "/update_weights", update("a", "b"), 409)
        assert (refused["code"], "the previous ones stay in use" in refused["error"]) == ("activation_failed", True)
        assert (len(server.launcher.engine.swaps), await version(server)) == (2, before)


async def test_requests_under_way_finish_before_the_exchange(start: Start) -> None:
    async with start(Launcher(lambda: Engine(delay=0.02)), drain_seconds=600) as server:
        engine, running = server.launcher.engine, asyncio.create_task(complete(server, 100))
        await eventually(lambda: engine.running)
        updating = asyncio.create_task(post(server, "/update_weights", update("a", "b")))
        await eventually(lambda: not server.state.models.default.released.is_set())
        late = asyncio.create_task(complete(server))
        assert engine.swaps == []
        await updating
        assert (await running).json()["system_fingerprint"] != (await late).json()["system_fingerprint"]
        assert (await late).json()["system_fingerprint"] == "base-0123456789ab"


async def test_requests_that_do_not_finish_in_time_keep_the_old_weights(start: Start) -> None:
    async with start(Launcher(lambda: Engine(delay=0.02)), drain_seconds=0.01) as server:
        engine, running = server.launcher.engine, asyncio.create_task(complete(server, 100))
        await eventually(lambda: engine.running)
        refused = await post(server, "/update_weights", update("a", "b"), 409)
        assert "1 requests were still running after 0.01 seconds." in refused["error"]
        assert engine.swaps == []
        assert (await running).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"), [("/pause?mode=keep", None), ("/pause_generation", {"mode": "in_place"}),
                       ("/pause_generation", {"mode": "retract"})]
)  # fmt: skip
async def test_requests_that_are_kept_continue_after_the_pause(start: Start, path: str, body: Any) -> None:
    async with start(Launcher(lambda: Engine(delay=0.01))) as server:
        engine, running = server.launcher.engine, asyncio.create_task(complete(server, 60))
        await eventually(lambda: engine.running)
        await post(server, path, body)
        assert (await server.client.get("/is_paused")).json() == {"is_paused": True}
        late = asyncio.create_task(complete(server))
        await post(server, "/update_weights", update("a", "b"))
        assert engine.swaps == [None]
        assert not running.done()
        assert not late.done()
        await post(server, "/resume")
        assert (await server.client.get("/is_paused")).json() == {"is_paused": False}
        assert (await running).json()["choices"][0]["text"] == "abc" * 20
        assert (await late).json()["system_fingerprint"] == "base-0123456789ab"


@pytest.mark.parametrize("stream", [False, True])
async def test_aborted_requests_return_what_they_have_generated(start: Start, stream: bool) -> None:
    async with start(Launcher(lambda: Engine(delay=0.01))) as server:
        engine = server.launcher.engine
        body = {"prompt": "abc", "max_tokens": 400, "stream": stream}
        running = asyncio.create_task(server.client.post("/v1/completions", json=body))
        chat = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 400, "stream": stream}
        chatting = asyncio.create_task(server.client.post("/v1/chat/completions", json=chat))
        native = asyncio.create_task(
            server.client.post("/generate", json={"inputs": "abc", "parameters": {"max_new_tokens": 400}})
        )
        await eventually(lambda: len(engine.running) == 3)
        await post(server, "/pause")
        for answer in (await running, await chatting):
            assert answer.status_code == 200
            assert '"finish_reason":"abort"' in answer.text
            assert "error" not in answer.text
        assert (await native).status_code == 503
        await post(server, "/resume")
        assert (await complete(server)).status_code == 200


async def test_requests_are_aborted_only_before_complete_weights_are_exchanged(start: Start) -> None:
    class Aborting(Engine):
        async def swap_weights(self) -> None:
            self.aborts = False  # the requests that ran have ended
            await super().swap_weights()

    tensors = {"dtypes": ["float32"], "shapes": [[]], "abort_all_requests": True}
    async with start(Launcher(lambda: Aborting(delay=0.01))) as server:
        engine, running = server.launcher.engine, asyncio.create_task(complete(server, 400))
        await eventually(lambda: engine.running)
        await post(server, "/update_weights_from_distributed", tensors | {"names": ["a"]})
        assert (engine.aborts, running.done()) == (False, False)
        await post(server, "/update_weights_from_distributed", tensors | {"names": ["b"]})
        assert (await running).json()["choices"][0]["finish_reason"] == "abort"
        assert len(engine.swaps) == 1


async def test_a_pause_may_wait_for_requests_under_way(start: Start) -> None:
    async with start(Launcher(lambda: Engine(delay=0.01))) as server:
        running = asyncio.create_task(complete(server, 60))
        await eventually(lambda: server.launcher.engine.running)
        await post(server, "/pause?mode=wait")
        assert (await running).json()["choices"][0]["finish_reason"] == "length"
        late = asyncio.create_task(complete(server))
        await post(server, "/pause?mode=wait")
        await post(server, "/resume")
        assert (await late).status_code == 200
        await post(server, "/resume")  # changes nothing


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": "abc"}), ("/generate", {"inputs": "abc", "stream": True}),
     ("/v1/messages", {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 3})],
)  # fmt: skip
async def test_a_request_whose_client_leaves_during_a_pause_ends(start: Start, path: str, body: Any) -> None:
    async with start(Launcher(Engine)) as server:
        await post(server, "/pause")
        has_left, messages = asyncio.Event(), [{"type": "http.request", "body": json.dumps(body).encode()}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        statuses: list[int] = []
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode(),
                 "root_path": "", "scheme": "http", "query_string": b"", "headers": headers,
                 "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}  # fmt: skip
        waiting = asyncio.create_task(server.app(scope, receive, send))
        counters = server.state.tenants.counters
        await eventually(lambda: any(tenant.running for tenant in counters.values()), "the request")
        has_left.set()
        await waiting
        assert statuses == [499]
        assert not any(tenant.running for tenant in counters.values())
        await post(server, "/resume")
        assert (await complete(server)).status_code == 200


async def test_a_pause_that_waits_is_ended_by_resume(start: Start) -> None:
    async with start(Launcher(lambda: Engine(delay=0.01))) as server:
        engine, running = server.launcher.engine, asyncio.create_task(complete(server, 60))
        await eventually(lambda: engine.running)
        pausing = asyncio.create_task(post(server, "/pause?mode=wait&clear_cache=false"))
        await eventually(lambda: server.state.models.default.is_paused)
        await post(server, "/resume")
        await pausing
        assert ("suspend",) not in engine.calls
        assert (await running).status_code == (await complete(server)).status_code == 200


async def test_a_pause_that_fails_pauses_nothing(start: Start) -> None:
    class Unable(Engine):
        async def suspend(self) -> None:
            raise GroupError("No.")

    async with start(Launcher(Unable)) as server:
        assert (await post(server, "/pause?mode=keep", status=409))["error"] == "No."
        assert (await complete(server)).status_code == 200


async def test_a_paused_server_activates_nothing_and_shuts_down(start: Start) -> None:
    async with start(Launcher(Engine)) as server:
        await post(server, "/pause")
        refused = await post(server, "/models/tiny/activate", {"source": "base"}, 409)
        assert "Generation is paused." in refused["error"]
        late = asyncio.create_task(complete(server))
        await asyncio.sleep(0)
        server.state.begin_drain()
        assert (await late).status_code == 503


async def test_a_model_with_adapters_keeps_its_weights(start: Start, tmp_path: Any) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    async with start(Launcher(Engine), adapters=(NamedAdapter("tutor", tmp_path / "a"),)) as server:
        refused = await post(server, "/update_weights", update("a", "b"), 409)
        assert "Unload first: tutor." in str(refused)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/update_weights", {"update_info": {"names": ["a"], "dtype_names": [], "shapes": [[1]]}}, "same length"),
        ("/update_weights", update("a", packed=True, shared_memory="x"), "either packed or shared_memory"),
        ("/update_weights", update(), "names"),
        ("/update_weights", update("a") | {"weight_version": "a b"}, "weight_version"),
        ("/update_weights_from_distributed", {"names": ["a"], "dtypes": ["int8"], "shapes": []}, "same length"),
        ("/update_weights_from_distributed", {"names": ["a"], "dtypes": ["int8"], "shapes": [[-1]]}, "shapes"),
        ("/init_weights_update_group", GROUP | {"master_address": "a b"}, "master_address"),
        ("/init_weights_update_group", GROUP | {"backend": "mpi"}, "backend"),
        ("/init_weights_update_group", GROUP | {"rank_offset": 0}, "rank_offset"),
        ("/init_weight_transfer_engine", {}, "init_info"),
        ("/pause?mode=stop", None, "mode"),
        ("/pause_generation", {"mode": "keep"}, "mode"),
    ],
)
async def test_bodies_that_mean_nothing_are_refused(start: Start, path: str, body: Any, message: str) -> None:
    async with start(Launcher(Engine)) as server:
        answer = await server.client.post(path, json=body)
        assert (answer.status_code, message in answer.text) == (422, True), answer.text
        assert server.launcher.engine.calls == []
