// The scales of the weights that serve: what needs a look first, a map of all of them, and one of them in detail.

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { writes } from "./chat_settings.js";
import { element, facts, renew, say, table } from "./dom.js";
import { COLOURS, HeatMap } from "./heatmap.js";
import { number, percent } from "./numbers.js";
import { onModels } from "./state.js";
import { level, sentence, trouble, verdict } from "./trouble.js";

const KEPT = 900; // looks: half an hour
const LISTED = 8;
const HINT = "Choose a tensor to see its numbers and how they have moved: by a click, or by Tab and the arrow keys.";

export function scalesView(section) {
  const view = new Scales();
  section.append(view.node);
  return view;
}

class Scales {
  constructor() {
    this.history = new Map(); // name -> [[seconds, amax, window amax]]
    this.started = Date.now();
    this.verdict = element("p", { id: "verdict", className: "verdict", role: "status" });
    this.list = element("ol", { className: "troubles" });
    this.by = element(
      "select",
      { id: "colour-by", onchange: () => this.draw() },
      ...COLOURS.map((name) => element("option", {}, name)),
    );
    this.model = element("select", { id: "scales-model", onchange: () => this.refresh().catch(() => {}) });
    this.which = element("label", { hidden: true }, "Model", this.model);
    onModels((models) => this.offer(models));
    this.map = new HeatMap((layers) => this.choose(layers));
    this.detail = element("div", { id: "detail", className: "card" }, element("p", { className: "quiet" }, HINT));
    this.chart = new Chart("Largest input over time", { across: (at) => `${Math.round(at)} s`, fromZero: true });
    this.all = element("div");
    this.weights = element("p", { className: "quiet" });
    this.node = element(
      "div",
      {},
      this.verdict,
      this.weights,
      this.list,
      element(
        "div",
        { className: "map-sides" },
        element("div", { className: "card" }, this.controls(), this.map.node, legend()),
        this.detail,
      ),
      element("details", { id: "all-scales" }, element("summary", {}, "All numbers, most trouble first"), this.all),
    );
  }

  /** Where the server holds several models, a choice between them. */
  offer(models) {
    const names = [...new Set(models.filter(writes).map((model) => model.root ?? model.id))];
    const chosen = this.model.value;
    this.model.replaceChildren(...names.map((name) => element("option", { selected: name === chosen }, name)));
    this.which.hidden = names.length < 2;
  }

  /** `#/scales/NAME` shows that tensor. */
  open([name]) {
    if (name) this.chosen = [name];
  }

  controls() {
    return element("div", { className: "row" }, this.which, element("label", {}, "Coloured by", this.by));
  }

  async refresh() {
    const { layers, weight_version: version } = await get(
      this.which.hidden ? "scales" : `scales?model=${encodeURIComponent(this.model.value)}`,
    );
    if (version !== this.version) this.history.clear();
    this.version = version;
    this.layers = layers;
    this.remember(layers);
    this.draw();
  }

  remember(layers) {
    const now = (Date.now() - this.started) / 1000;
    for (const { name, amax, window_amax: window } of layers) {
      if (amax === null) continue;
      const past = this.history.get(name) ?? [];
      past.push([now, amax, window]);
      this.history.set(name, past.slice(-KEPT));
    }
  }

  draw() {
    if (!this.layers) return;
    const worst = [...this.layers].sort((a, b) => trouble(b) - trouble(a));
    const found = worst.filter((layer) => level(layer) > 0);
    say(this.verdict, verdict(this.layers));
    this.verdict.dataset.level = found.length ? level(found[0]) : 0;
    say(this.weights, `Weights: ${this.version}.`);
    renew(this.list, found.slice(0, LISTED), () => found.slice(0, LISTED).map((layer) => this.line(layer)));
    this.map.draw(this.layers, this.by.value);
    renew(this.all, this.layers, () => (worst.length ? [numbers(worst)] : []));
    this.showDetail();
  }

  line(layer) {
    const open = element(
      "button",
      { type: "button", className: "plain", onclick: () => this.choose([layer]) },
      sentence(layer),
    );
    open.dataset.key = layer.name;
    return element("li", { className: `level-${level(layer)}` }, open);
  }

  choose(layers) {
    this.chosen = [...layers].sort((a, b) => trouble(b) - trouble(a)).map((layer) => layer.name);
    history.replaceState(null, "", `#/scales/${encodeURIComponent(this.chosen[0])}`);
    this.showDetail();
  }

  /** The layer that was chosen; of several in one cell the one with most trouble, and how many there are. */
  showDetail() {
    const layer = this.layers?.find(({ name }) => name === this.chosen?.[0]);
    if (!layer) return;
    renew(this.detail, [layer, this.chosen.length], () => [
      element("h3", {}, layer.name),
      element("p", {}, sentence(layer)),
      this.others(),
      detailFacts(layer),
      this.chart.node,
    ]);
    this.drawHistory(layer);
  }

  others() {
    return this.chosen.length > 1
      ? element("p", { className: "quiet" }, `The one with most trouble of ${this.chosen.length} in this place.`)
      : null;
  }

  drawHistory(layer) {
    const past = this.history.get(layer.name) ?? [];
    if (past.length === 0) return this.chart.draw([]);
    const [from, to] = [past[0][0], past.at(-1)[0]];
    const limit = layer.amax !== null && layer.headroom ? layer.amax * layer.headroom : null;
    const windows = past.filter(([, , window]) => window !== null).map(([at, , window]) => [at, window]);
    const series = [
      { name: "largest since the start", kind: "first", points: past.map(([at, amax]) => [at, amax]) },
      { name: "of the last window", kind: "second", points: windows },
      {
        name: "calibrated",
        kind: "third",
        points:
          layer.calibrated_amax === null
            ? []
            : [
                [from, layer.calibrated_amax],
                [to, layer.calibrated_amax],
              ],
      },
      {
        name: "cut off above",
        kind: "limit",
        points:
          limit === null
            ? []
            : [
                [from, limit],
                [to, limit],
              ],
      },
    ];
    this.chart.draw(series, "Since this page was opened, read every two seconds.");
  }
}

function detailFacts(layer) {
  return facts([
    ["Input", layer.input],
    ["Largest input", number(layer.amax)],
    ["Scale", number(layer.scale)],
    ["Headroom", layer.headroom === null ? "–" : `${number(layer.headroom)}×`],
    ["Cut off", `${percent(layer.saturation)}${layer.saturated ? `, ${layer.saturated} elements` : ""}`],
    ["Calibrated", number(layer.calibrated_amax)],
    ["Last window", number(layer.window_amax)],
    ["Cut off in it", percent(layer.window_saturation)],
    ["Drift", layer.drift === null ? "–" : `${number(layer.drift)}×`],
  ]);
}

function numbers(layers) {
  const rows = layers.map((layer) => [
    layer.name,
    number(layer.amax),
    number(layer.scale),
    layer.headroom === null ? "–" : `${number(layer.headroom)}×`,
    mark(percent(layer.saturation), level(layer)),
    layer.drift === null ? "–" : `${number(layer.drift)}×`,
  ]);
  return table(
    "The input of every FP8 layer",
    ["Layer", "amax", "Scale", "Headroom", "Cut off", "Drift"],
    rows,
    "stacked numbers",
  );
}

const mark = (text, found) => element("span", { className: found ? `level-${found}` : "" }, text);

function legend() {
  const shades = [0, 1, 2, 3, 4, 5].map((i) => element("span", { className: `swatch shade-${i}` }));
  return element(
    "p",
    { className: "quiet map-legend" },
    "calm ",
    ...shades,
    " near the end of the format ",
    element("span", { className: "swatch level-1" }, "!"),
    " worth a look ",
    element("span", { className: "swatch level-2" }, "!"),
    " costs quality",
  );
}
