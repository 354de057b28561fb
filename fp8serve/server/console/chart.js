// A line chart: some series over one axis, with a legend, a sentence for who does not see it, and the value under the
// pointer. Drawn at the width that it has, so that its text is never scaled.

import { drawn, element, say } from "./dom.js";
import { number } from "./numbers.js";

const HEIGHT = 200;
const DOTTED = 40; // points; dots would hide a line of more points
const [LEFT, RIGHT, TOP, BOTTOM] = [52, 10, 10, 24];

export class Chart {
  /** `title`: what the chart shows. `across`: what the horizontal axis counts. `digits`: formats a value. */
  constructor(title, { across = "step", digits = number, fromZero = false } = {}) {
    Object.assign(this, { title, across, digits, fromZero });
    this.svg = drawn("svg", { role: "img", class: "chart" });
    this.legend = element("ul", { className: "legend" });
    this.note = element("figcaption", { className: "quiet" });
    this.node = element("figure", { hidden: true }, this.legend, this.svg, this.note);
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.series && this.draw(this.series, this.sentence)).observe(this.node);
  }

  /** `series`: [{name, kind, points: [[x, y]]}]; kind is a class of the style sheet. `sentence`: the result in words. */
  draw(series, sentence = "") {
    this.series = series.filter(({ points }) => points.length);
    this.sentence = sentence;
    this.node.hidden = this.series.length === 0;
    say(this.note, sentence);
    const width = this.node.clientWidth;
    if (this.node.hidden || !width) return;
    this.scale(width);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.setAttribute("height", HEIGHT);
    this.pointer = drawn("g");
    this.svg.replaceChildren(
      drawn("title", {}, `${this.title}. ${sentence}`),
      ...this.axes(width),
      ...this.series.flatMap((one) => this.line(one)),
      this.pointer,
    );
    this.legend.hidden = this.series.length < 2;
    this.legend.replaceChildren(...this.series.map(({ name, kind }) => element("li", {}, sample(kind), name)));
  }

  scale(width) {
    const xs = this.series.flatMap(({ points }) => points.map(([x]) => x)),
      ys = this.series.flatMap(({ points }) => points.map(([, y]) => y));
    const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
    this.ticks = ticks(this.fromZero ? 0 : Math.min(...ys), Math.max(...ys));
    const [y0, y1] = [this.ticks[0], this.ticks.at(-1)];
    this.ends = [x0, x1];
    this.x = (x) => LEFT + ((width - LEFT - RIGHT) * (x - x0)) / (x1 - x0 || 1);
    this.y = (y) => HEIGHT - BOTTOM - ((HEIGHT - BOTTOM - TOP) * (y - y0)) / (y1 - y0 || 1);
  }

  axes(width) {
    const lines = this.ticks.flatMap((tick) => [
      drawn("line", { class: "axis", x1: LEFT, x2: width - RIGHT, y1: this.y(tick), y2: this.y(tick) }),
      drawn("text", { x: LEFT - 6, y: this.y(tick) + 4, "text-anchor": "end" }, this.digits(tick)),
    ]);
    const ends = this.ends[0] === this.ends[1] ? [this.ends[0]] : this.ends;
    return [
      ...lines,
      ...ends.map((end, i) =>
        drawn("text", { x: this.x(end), y: HEIGHT - 6, "text-anchor": i ? "end" : "start" }, this.named(end)),
      ),
    ];
  }

  named(x) {
    return typeof this.across === "function" ? this.across(x) : `${this.across} ${x}`;
  }

  line({ kind, points }) {
    const path = points.map(([x, y]) => `${this.x(x).toFixed(1)},${this.y(y).toFixed(1)}`).join(" ");
    const line = drawn("polyline", { class: `line ${kind}`, points: path });
    if (points.length > 1 && (kind !== "second" || points.length > DOTTED)) return [line];
    return [
      line,
      ...points.map(([x, y]) =>
        drawn("circle", { class: `dot ${kind}`, cx: this.x(x).toFixed(1), cy: this.y(y).toFixed(1), r: 3 }),
      ),
    ];
  }

  /** Shows the values at the pointer in the caption. */
  point(event) {
    if (!this.x) return;
    if (event === null) {
      this.pointer.replaceChildren();
      return say(this.note, this.sentence);
    }
    const at = event.clientX - this.svg.getBoundingClientRect().left;
    const all = this.series.flatMap(({ name, points }) => points.map(([x, y]) => ({ name, x, y })));
    const { x } = all.reduce((best, one) =>
      Math.abs(this.x(one.x) - at) < Math.abs(this.x(best.x) - at) ? one : best,
    );
    this.pointer.replaceChildren(
      drawn("line", { class: "pointer", x1: this.x(x), x2: this.x(x), y1: TOP, y2: HEIGHT - BOTTOM }),
    );
    say(
      this.note,
      `${this.named(x)}: ${all
        .filter((one) => one.x === x)
        .map((one) => `${one.name} ${this.digits(one.y)}`)
        .join(", ")}`,
    );
  }
}

function sample(kind) {
  return drawn(
    "svg",
    { viewBox: "0 0 24 8", width: 24, height: 8, "aria-hidden": "true" },
    drawn("line", { class: `line ${kind}`, x1: 0, x2: 24, y1: 4, y2: 4 }),
  );
}

/** Returns three to six round numbers that enclose low and high. */
function ticks(low, high) {
  if (high - low < Math.abs(high) * 1e-9 + 1e-30)
    [low, high] = high === 0 ? [0, 1] : [Math.min(0, low), Math.max(0, high)];
  const rough = (high - low) / 4,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((one) => one >= rough * 0.999);
  const [first, last] = [Math.floor(low / step + 1e-9), Math.ceil(high / step - 1e-9)];
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(12)));
}
