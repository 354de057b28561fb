// The scales of the weights that serve: problems first, then a map of all scales, and one scale in detail.

import { get } from "./api.js";
import { Chart } from "./chart.js";
import { writes } from "./chat_settings.js";
import { element, facts, labelled, renew, say, table } from "./dom.js";
import { COLOURS, HeatMap, legend } from "./heatmap.js";
import { moment, number, percent } from "./numbers.js";
import { onModels } from "./state.js";
import { level, sentence, trouble, verdict } from "./trouble.js";

const LISTED = 8;
const HINT = "Choose a tensor to see its numbers and how they have moved: by a click, or by Tab and the arrow keys.";

export class Scales {
  constructor() {
    this.past = { entries: [] }; // of the layer in detail, from /scales/history
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
    this.legend = element("div", { className: "quiet map-legend" });
    this.map = new HeatMap((layers) => this.choose(layers));
    this.detail = element("div", { id: "detail", className: "card" }, element("p", { className: "quiet" }, HINT));
    this.chart = new Chart("Largest input over time", { across: clock, fromZero: true });
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
        element("div", { className: "card" }, this.controls(), this.legend, this.map.node),
        this.detail,
      ),
      element("details", { id: "all-scales" }, element("summary", {}, "All numbers, most trouble first"), this.all),
    );
  }

  /** If the server has several models, a list to choose from. */
  offer(models) {
    const names = [...new Set(models.filter(writes).map((model) => model.parent ?? model.root ?? model.id))];
    const chosen = this.model.value;
    this.model.replaceChildren(...names.map((name) => element("option", { selected: name === chosen }, name)));
    this.which.hidden = names.length < 2;
  }

  /** `#/scales/NAME` shows that tensor. */
  open([name]) {
    if (name) this.chosen = [name];
  }

  controls() {
    return element("div", { className: "row" }, this.which, labelled("Coloured by", this.by));
  }

  async refresh() {
    const { layers, weight_version: version } = await this.get("scales");
    this.version = version;
    this.layers = layers;
    this.draw();
    await this.look();
  }

  get(path, query = {}) {
    const parameters = new URLSearchParams({ ...query, ...(!this.which.hidden && { model: this.model.value }) });
    return get(parameters.size ? `${path}?${parameters}` : path);
  }

  /** Requests the history of the layer in detail, and draws it. */
  async look() {
    const layer = this.inDetail;
    if (!layer || layer.scale === null) return;
    const past = await this.get("scales/history", { layer: layer.name });
    if (past.layer !== this.inDetail?.name) return; // another was chosen meanwhile
    this.past = past;
    this.drawHistory(layer);
  }

  get inDetail() {
    return this.layers?.find(({ name }) => name === this.chosen?.[0]);
  }

  draw() {
    if (!this.layers) return;
    const worst = [...this.layers].sort((a, b) => trouble(b) - trouble(a));
    const troubled = worst.filter((layer) => level(layer) > 0);
    say(this.verdict, verdict(this.layers));
    this.verdict.dataset.level = troubled.length ? level(troubled[0]) : 0;
    say(this.weights, `Weights: ${this.version}.`);
    const listed = troubled.slice(0, LISTED);
    renew(this.list, listed, () => listed.map((layer) => this.line(layer)));
    this.map.draw(this.layers, this.by.value);
    renew(this.legend, this.by.value, () => legend(this.by.value));
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
    this.look().catch(() => {}); // the next refresh asks again
  }

  /** The chosen layer. If a cell has several layers, the worst of them, and their number. */
  showDetail() {
    const layer = this.inDetail;
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
    const { layer: name, weight_version: version, entries } = this.past;
    if (name !== layer.name || version !== this.version || entries.length === 0) return this.chart.draw([]);
    const line = (of) => entries.map((entry) => [entry.at, of(entry)]).filter(([, value]) => value !== null);
    const limit = layer.amax && layer.headroom ? layer.amax * layer.headroom * layer.scale : null; // times the scale
    this.chart.draw(
      [
        { name: "largest since the start", kind: "first", points: line(({ amax }) => amax) },
        { name: "of the last window", kind: "second", points: line((entry) => entry.window_amax) },
        { name: "calibrated", kind: "third", points: line(() => layer.calibrated_amax) },
        { name: "cut off above", kind: "limit", points: line(({ scale }) => limit && limit / scale) },
      ],
      `As the server has seen it since ${moment(entries[0].at)}.`,
    );
  }
}

/** A time of a history as a clock shows it. */
function clock(at) {
  return new Date(at * 1000).toLocaleTimeString("en-GB");
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

const mark = (text, level) => element("span", { className: level ? `level-${level}` : "" }, text);
