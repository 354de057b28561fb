"""The map of scales: real ones, made-up trouble, the keyboard, a phone."""

import pytest

from tests.server.console.browser import Browser
from tests.server.console.canned import NO_HISTORY, answer_with, layer
from tests.server.console.test_frame import ready
from tests.server.process import Process

pytestmark = pytest.mark.browser
CELLS = "document.querySelectorAll('.map td[role]').length"


def show(browser: Browser, *layers: dict[str, object]) -> None:
    answer_with(browser, "/scales", {"weight_version": "base-0", "layers": list(layers)})
    answer_with(browser, "/scales/history", NO_HISTORY)


def test_live_scales_have_a_map_a_detail_and_a_history(browser: Browser, scaled: Process) -> None:
    ready(browser, scaled.url + "/#/scales")
    browser.until(f"{CELLS} === 14")
    scaled.client.post("/generate", json={"inputs": "Once upon", "parameters": {"max_new_tokens": 8}})
    browser.until("!document.getElementById('verdict').textContent.startsWith('No input')")
    browser.click(".map td[role]")
    browser.until("document.querySelector('#detail h3')?.textContent === 'model.layers.0.self_attn.q_proj'")
    browser.until("document.querySelectorAll('#detail .chart polyline').length >= 2")
    assert browser.run("return decodeURIComponent(location.hash)") == "#/scales/model.layers.0.self_attn.q_proj"
    name = "model.layers.0.self_attn.q_proj"
    looks = len(scaled.client.get("/scales/history", params={"layer": name}).json()["entries"])
    assert looks >= 1
    ready(browser, f"{scaled.url}/#/scales/{name}")  # opened late: what was before is there
    browser.until("document.querySelectorAll('#detail .chart polyline').length >= 2")
    points = browser.run(
        "return document.querySelector('#detail polyline.first').getAttribute('points').split(' ').length"
    )
    assert points >= looks
    assert "As the server has seen it since" in browser.text("#detail figcaption")
    browser.press("All numbers, most trouble first")
    assert browser.count("#all-scales tbody tr") == 14
    assert browser.complaints() == []


@pytest.mark.smoke
def test_the_page_says_that_scales_follow_every_input(browser: Browser, server: Process) -> None:
    ready(browser, server.url + "/#/scales")
    browser.until("document.getElementById('verdict').textContent.startsWith('These scales follow every input')")
    assert browser.complaints() == []


def test_only_notable_saturation_is_coloured(browser: Browser, server: Process) -> None:
    """A scale from calibration data saturates on a few values of other data; 0.01 % of them is normal."""
    ready(browser, server.url + "/#/scales")
    shares = {0.0: 0, 1e-4: 0, 9e-4: 0, 2e-3: 1, 2e-2: 2}
    show(browser, *(layer(f"model.layers.{i}.q_proj", saturation=share) for i, share in enumerate(shares)))
    browser.until(f"{CELLS} === 5")
    for i, level in enumerate(shares.values()):
        assert browser.count(f".map tbody tr:nth-child({i + 1}) .level-{level}") == (1 if level else 0)
    assert browser.text("#verdict") == "2 of 5 scales need a look. model.layers.4.q_proj cuts off 2 % of its input."
    names = browser.run("return [...document.querySelectorAll('.troubles button')].map((one) => one.textContent)")
    assert [name.split()[0] for name in names] == ["model.layers.4.q_proj", "model.layers.3.q_proj"]
    browser.press(names[1])
    browser.until("document.querySelector('#detail h3')?.textContent === 'model.layers.3.q_proj'")
    show(browser, layer("model.layers.0.q_proj"), layer("lm_head"))
    browser.until("document.getElementById('verdict').textContent.startsWith('All is well')")
    assert browser.count(".level-1, .level-2") == 2  # the legend
    show(browser, layer("a", drifts=True, drift=3.0))
    browser.until("document.getElementById('verdict').textContent.includes('3 times what calibration saw')")
    show(browser)
    browser.until("document.getElementById('verdict').textContent.startsWith('These weights run in high precision')")
    assert browser.complaints() == []


def test_the_legend_says_what_the_colours_mean(browser: Browser, server: Process) -> None:
    ready(browser, server.url + "/#/scales")
    rooms = {20.0: "from 16×", 10.0: "below 16×", 3.0: "below 4×", 0.5: "below 1×"}
    show(browser, *(layer(f"model.layers.{i}.q_proj", headroom=room) for i, room in enumerate(rooms)))
    browser.until(f"{CELLS} === 4")
    assert browser.text(".map-legend p") == "Share of an input's values beyond the range of its scale:"
    assert "from 0.001 %" in browser.text(".map-legend ul")
    browser.choose("#colour-by", "headroom")
    assert browser.text(".map-legend p").startswith("How many times as large an input could be")
    meanings = browser.run(
        "return [...document.querySelectorAll('.map td[role]')].map((cell) =>"
        " document.querySelector(`.map-legend .${cell.className}`).parentElement.textContent)"
    )
    assert meanings == list(rooms.values())
    browser.choose("#colour-by", "drift")
    assert "from 1.7×" in browser.text(".map-legend ul")
    assert "worth a look: 0.1 % cut off, or drift beyond the alarm" in browser.text(".map-legend ul")


def test_the_map_is_walked_by_keyboard(browser: Browser, server: Process) -> None:
    ready(browser, server.url + "/#/scales")
    names = [f"model.layers.{i}.{part}" for i in range(2) for part in ("self_attn.q_proj", "mlp.up_proj")]
    show(browser, *map(layer, names))
    browser.until(f"{CELLS} === 4")
    browser.run("document.getElementById('colour-by').focus()")
    browser.type("Tab", "Right", "Down", "Right")
    assert browser.run("return document.activeElement.dataset.place") == "1 1"
    assert browser.run("return document.activeElement.ariaLabel").startswith("model.layers.1.mlp.up_proj: cut off 0 %")
    browser.until("document.querySelector('#detail h3')?.textContent === 'model.layers.1.mlp.up_proj'")
    browser.choose("#colour-by", "headroom")
    assert "headroom 2.24×" in browser.run("return document.querySelector('.map td[tabindex=\"0\"]').ariaLabel")
    show(browser, *(layer(name, saturation=1e-4) for name in names))  # drawn anew below the focus
    browser.run("document.querySelector('.map td[tabindex=\"0\"]').focus()")
    browser.until("document.querySelector('#detail').textContent.includes('0.01 %')")
    assert browser.run("return document.activeElement.dataset.place") == "1 1"


def test_many_experts_share_a_cell(browser: Browser, server: Process) -> None:
    ready(browser, server.url + "/#/scales")
    show(browser, *(layer(f"model.layers.0.mlp.experts.{i}.up_proj", saturation=i / 100) for i in range(3)))
    browser.until(f"{CELLS} === 1")
    assert "experts.2.up_proj, the worst of 3" in browser.run(
        "return document.querySelector('.map td[role]').ariaLabel"
    )


def test_on_a_phone_every_number_of_a_layer_is_in_sight(browser: Browser, scaled: Process) -> None:
    browser.size(390, 844)
    ready(browser, scaled.url + "/#/scales")
    browser.until(f"{CELLS} === 14")
    browser.press("All numbers, most trouble first")
    boxes = browser.run(
        "return [...document.querySelectorAll('#all-scales tbody :is(th, td), .map td[role]')]"
        ".map((d) => d.getBoundingClientRect()).map((b) => [b.left, b.right, b.width, b.height])"
    )
    assert len(boxes) == 14 * 6 + 14
    assert all(start >= 0 and right <= 390 and width > 0 and height > 0 for start, right, width, height in boxes)
