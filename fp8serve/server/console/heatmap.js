// Scales as a map: a row for each decoder layer, a column for each tensor. One cell can have the focus, and the arrow
// keys move it.

import { element, renew } from "./dom.js";
import { percent, number } from "./numbers.js";
import { level, MANY, SOME, trouble } from "./trouble.js";

/**
 * What a cell is coloured by. `steps`: a value that has passed the n-th of them has shade n; they fall where a small
 * value is the bad one. `meaning`: for the legend.
 */
const BY = {
  "cut off": {
    value: (layer) => layer.saturation,
    text: percent,
    steps: [1e-6, 1e-5, 1e-4, 3e-4, 6e-4],
    meaning: "Share of an input's values beyond the range of its scale",
  },
  headroom: {
    value: (layer) => layer.headroom,
    text: (room) => `${number(room)}×`,
    steps: [16, 8, 4, 2, 1],
    meaning: "How many times as large an input could be before values are cut off",
  },
  drift: {
    value: (layer) => layer.drift,
    text: (drift) => `${number(drift)}×`,
    steps: [0.4, 0.6, 0.85, 1.2, 1.7],
    meaning: "Largest input over the largest that calibration saw",
  },
};
export const COLOURS = Object.keys(BY);

/** The number of steps that `value` has reached, or has fallen below if the steps fall. */
function shade({ steps }, value) {
  const falls = steps[0] > steps[1];
  return steps.filter((step) => (falls ? value < step : value >= step)).length;
}

/** The legend of the map when it is coloured `by` a name of COLOURS. */
export function legend(by) {
  const { steps, text, meaning } = BY[by];
  const [below, from] = steps[0] > steps[1] ? ["from", "below"] : ["below", "from"];
  const key = (className, mark, name) =>
    element("li", {}, element("span", { className: `swatch ${className}`, "aria-hidden": "true" }, mark), name);
  return [
    element("p", {}, `${meaning}:`),
    element(
      "ul",
      {},
      key("shade-0", "", `${below} ${text(steps[0])}`),
      ...steps.map((step, i) => key(`shade-${i + 1}`, "", `${from} ${text(step)}`)),
      key("unknown", "", "no figure yet"),
      key("level-1", "!", `worth a look: ${percent(SOME)} cut off, or drift beyond the alarm`),
      key("level-2", "!", `costs quality: ${percent(MANY)} cut off`),
    ),
  ];
}

export class HeatMap {
  /** `choose` is called with the layers of a cell that is selected. */
  constructor(choose) {
    this.choose = choose;
    this.at = [0, 0];
    this.head = element("tr");
    this.body = element("tbody");
    this.table = element(
      "table",
      {
        className: "map",
        role: "grid",
        "aria-label": "Scales by layer and tensor. The arrow keys move from one to the next.",
      },
      element("thead", {}, this.head),
      this.body,
    );
    this.node = element("div", { className: "scroll" }, this.table);
    this.table.addEventListener("keydown", (event) => this.move(event));
    this.table.addEventListener("click", (event) => this.reach(event.target.closest("td[data-place]"), true));
    this.table.addEventListener("focusin", (event) => this.reach(event.target.closest("td[data-place]"), false));
  }

  draw(layers, by) {
    this.layers = layers;
    const { rows, columns } = arranged(layers);
    renew(this.head, columns, () => [
      element("th", { scope: "col" }, element("span", { className: "unseen" }, "Layer")),
      ...columns.map((name) => element("th", { scope: "col", title: name }, element("span", {}, short(name)))),
    ]);
    renew(
      this.body,
      [
        by,
        rows.map(([, cells]) =>
          cells.map((cell) => cell && [cell.length, BY[by].value(worst(cell)), level(worst(cell))]),
        ),
      ],
      () =>
        rows.map(([name, cells], y) =>
          element(
            "tr",
            {},
            element("th", { scope: "row" }, name),
            ...cells.map((cell, x) => this.cell(cell, by, y, x, columns[x])),
          ),
        ),
    );
    this.rows = rows;
  }

  cell(cell, by, y, x, column) {
    if (!cell) return element("td", { className: "none" });
    const layer = worst(cell),
      { value, text } = BY[by],
      figure = value(layer);
    const trouble = level(layer);
    const isUnknown = figure === null || figure === undefined;
    const node = element(
      "td",
      {
        role: "gridcell",
        className: trouble ? `level-${trouble}` : isUnknown ? "unknown" : `shade-${shade(BY[by], figure)}`,
      },
      trouble ? "!" : "",
    );
    node.dataset.place = node.dataset.key = `${y} ${x}`;
    node.tabIndex = this.at[0] === y && this.at[1] === x ? 0 : -1;
    const many = cell.length > 1 ? `, the worst of ${cell.length}` : "";
    node.setAttribute(
      "aria-label",
      `${layer.name}${many}: ${by} ${isUnknown ? "unknown" : text(figure)}${trouble ? ", needs a look" : ""}`,
    );
    node.title = node.getAttribute("aria-label");
    return node;
  }

  reach(cell, focus) {
    if (!cell) return;
    this.table.querySelector('[tabindex="0"]')?.setAttribute("tabindex", "-1");
    cell.tabIndex = 0;
    const [y, x] = (this.at = cell.dataset.place.split(" ").map(Number));
    if (focus && document.activeElement !== cell) return cell.focus(); // the focus event runs this function again
    this.choose(this.rows[y][1][x]);
  }

  move(event) {
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!by) return;
    event.preventDefault();
    let [y, x] = this.at;
    do {
      y += by[0];
      x += by[1];
    } while (this.rows[y] && x >= 0 && x < this.rows[y][1].length && !this.rows[y][1][x]);
    this.reach(this.table.querySelector(`[data-place="${y} ${x}"]`), true);
  }
}

const worst = (cell) => cell.reduce((a, b) => (trouble(b) > trouble(a) ? b : a));
const short = (name) =>
  name
    .split(".")
    .at(-1)
    .replace(/_proj$/, "");

/** Rows [name, cells] in the order of the model; a cell has all layers of its position, such as those of all experts. */
function arranged(layers) {
  const rows = new Map(),
    columns = [];
  for (const layer of layers) {
    const [, row, rest] = layer.name.match(/^(?:.*?\.)?(\d+)\.(.*)$/) ?? [null, "other", layer.name];
    const column = rest.replace(/\.\d+(?=\.|$)/g, ".*");
    if (!columns.includes(column)) columns.push(column);
    if (!rows.has(row)) rows.set(row, new Map());
    rows.get(row).set(column, [...(rows.get(row).get(column) ?? []), layer]);
  }
  return {
    columns,
    rows: [...rows].map(([name, cells]) => [name, columns.map((column) => cells.get(column) ?? null)]),
  };
}
