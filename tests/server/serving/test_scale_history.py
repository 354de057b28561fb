"""The history of scales is bounded, covers the whole time, and keeps every peak; a route returns it."""

from typing import Any

from fp8serve.server.serving import served_scales
from fp8serve.server.serving.served_scales import MAX_ENTRIES, MIN_ENTRIES, ScaleHistory
from tests.patience import eventually
from tests.server.conftest import Start


def record(name: str, amax: float, window: float | None = None, scale: float | None = 2.0) -> dict[str, Any]:
    return {"name": name, "amax": amax, "window_amax": window, "scale": scale}


def values(history: ScaleHistory, layer: str, key: str) -> list[float | None]:
    return [entry[key] for entry in history.entries(layer) or []]


def test_a_full_history_reaches_from_the_first_look_to_the_last_and_keeps_peaks() -> None:
    history = ScaleHistory()
    looks = 5 * MAX_ENTRIES + 3
    for i in range(looks):
        window = None if i < MAX_ENTRIES else 100.0 if i == 700 else 1.0
        history.add("v", [record("a", float(i), window, scale=float(i)), record("follows", 1.0, scale=None)])
    amaxes = values(history, "a", "amax")
    assert MAX_ENTRIES / 2 <= len(amaxes) <= MAX_ENTRIES
    assert amaxes == sorted(amaxes, key=lambda value: value or 0.0)
    assert (amaxes[0], amaxes[-1]) == (7.0, looks - 1.0)  # an entry is eight looks, and the last one is begun
    assert values(history, "a", "scale") == amaxes  # the later one's
    windows = values(history, "a", "window_amax")
    assert windows[0] is None
    assert windows.count(100.0) == 1
    times = values(history, "a", "at")
    assert times == sorted(times, key=lambda at: at or 0.0)
    assert history.entries("follows") is None


def test_other_weights_begin_anew_and_many_layers_have_few_entries(monkeypatch: Any) -> None:
    history = ScaleHistory()
    history.add("v", [record("a", 1.0)])
    history.add("w", [record("a", 2.0)])
    assert values(history, "a", "amax") == [2.0]
    history.add("w", [record("b", 3.0)])  # as after a recipe of other layers
    assert history.entries("a") is None
    monkeypatch.setattr(served_scales, "MAX_VALUES", 1)
    crowded = ScaleHistory()
    for i in range(4 * MIN_ENTRIES + 1):
        crowded.add("v", [record("a", float(i))])
    assert len(values(crowded, "a", "amax")) <= MIN_ENTRIES


async def test_the_history_is_served_layer_by_layer(start: Start) -> None:
    async with start() as server:
        name = "model.layers.0.mlp.up_proj"
        history = server.state.models.default.history
        await eventually(lambda: history.entries(name))  # the first look is at once
        response = (await server.client.get("/scales/history", params={"layer": name})).json()
        version = (await server.client.get("/scales")).json()["weight_version"]
        assert (response["weight_version"], response["layer"]) == (version, name)
        assert [(one["amax"], one["window_amax"], one["scale"]) for one in response["entries"]] == [(3.0, 3.0, 2.0)]
        answers = {
            query: (await server.client.get(f"/scales/history?{query}")).status_code
            for query in ("layer=nothing", "", f"layer={name}&model=nobody", f"layer={name}&model=tiny")
        }
        assert list(answers.values()) == [422, 422, 404, 200]
