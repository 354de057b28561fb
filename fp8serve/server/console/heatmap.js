// Scales as a map: a row for each decoder layer, a column for each tensor. One cell can have the focus, and the arrow
// keys move it.

import { element, renew } from "./dom.js";
import { percent, number } from "./numbers.js";
import { level, trouble } from "./trouble.js";

/** What a cell is coloured by: a level from 0 (calm) to 5, and the number that is said. */
const BY = {
  "cut off": {
    value: (layer) => layer.saturation,
    text: percent,
    shade: (share) => (share > 0 ? Math.min(5, Math.max(1, Math.round(Math.log10(share)) + 6)) : 0),
  },
  headroom: {
    value: (layer) => layer.headroom,
    text: (room) => `${number(room)}×`,
    shade: (room) => Math.min(5, Math.max(0, 4 - Math.floor(Math.log2(room)))),
  },
  drift: {
    value: (layer) => layer.drift,
    text: (drift) => `${number(drift)}×`,
    shade: (drift) => Math.min(5, Math.max(0, Math.round(3 + 2 * Math.log2(drift)))),
  },
};
export const COLOURS = Object.keys(BY);

export class HeatMap {
  /** `choose`: called with the layers of a cell that was reached. */
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
      { value, text, shade } = BY[by],
      found = value(layer);
    const trouble = level(layer);
    const shown = found === null || found === undefined;
    const node = element(
      "td",
      { role: "gridcell", className: trouble ? `level-${trouble}` : shown ? "unknown" : `shade-${shade(found)}` },
      trouble ? "!" : "",
    );
    node.dataset.place = node.dataset.key = `${y} ${x}`;
    node.tabIndex = this.at[0] === y && this.at[1] === x ? 0 : -1;
    const many = cell.length > 1 ? `, the worst of ${cell.length}` : "";
    node.setAttribute(
      "aria-label",
      `${layer.name}${many}: ${by} ${shown ? "unknown" : text(found)}${trouble ? ", needs a look" : ""}`,
    );
    node.title = node.getAttribute("aria-label");
    return node;
  }

  reach(cell, focus) {
    if (!cell) return;
    this.table.querySelector('[tabindex="0"]')?.setAttribute("tabindex", "-1");
    cell.tabIndex = 0;
    const [y, x] = (this.at = cell.dataset.place.split(" ").map(Number));
    if (focus && document.activeElement !== cell) return cell.focus(); // which comes back here
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

/** Rows [name, cells] in the order of the model; a cell holds the layers of its place, such as those of all experts. */
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
