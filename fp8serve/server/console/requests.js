// What the server is doing now: requests in flight, the queue, the cache, tokens per second, and how requests ended.

import { get, post, request } from "./api.js";
import { Chart } from "./chart.js";
import { button, element, facts, renew, table } from "./dom.js";
import { count, percent, seconds } from "./numbers.js";
import { announce } from "./state.js";

const KEPT = 150; // looks: five minutes

export class Requests {
  constructor() {
    this.started = performance.now();
    this.speeds = []; // [seconds, generated tokens/s, prompt tokens/s]
    this.tiles = element("ul", { className: "tiles", id: "tiles" });
    this.chart = new Chart("Tokens per second", { across: (at) => `${Math.round(at)} s`, fromZero: true });
    this.active = new ActiveRequests();
    this.latency = element("div", { className: "card" });
    this.ends = element("div", { className: "card" });
    this.drafts = element("div", { className: "card", id: "drafts", hidden: true });
    this.tenants = element("div", { className: "card", hidden: true });
    this.node = element(
      "div",
      {},
      this.tiles,
      this.active.node,
      element("div", { className: "card" }, element("h3", {}, "Tokens per second"), this.chart.node),
      element("div", { className: "sides" }, this.latency, this.ends),
      this.drafts,
      this.tenants,
    );
  }

  async refresh() {
    await this.active.refresh();
    const samples = new Samples(await (await request("metrics")).text());
    this.measure(samples);
    this.drawTiles(samples);
    this.drawLatency(samples);
    this.drawEnds(samples);
    this.drawDrafts(samples);
    this.drawTenants(samples);
  }

  measure(samples) {
    const now = performance.now() / 1000;
    const totals = ["fp8serve_generated_tokens_total", "fp8serve_prompt_tokens_total"].map(
      (name) => samples.sum(name) ?? 0,
    );
    if (this.last && totals[0] >= this.last.totals[0] && now > this.last.now) {
      const per = (i) => Math.max(0, (totals[i] - this.last.totals[i]) / (now - this.last.now));
      this.speeds = [...this.speeds, [now - this.started / 1000, per(0), per(1)]].slice(-KEPT);
    }
    this.last = { now, totals };
    const named = (name, kind, i) => ({ name, kind, points: this.speeds.map((speed) => [speed[0], speed[i]]) });
    this.chart.draw(
      [named("generated", "first", 1), named("of prompts, counted when their request ends", "third", 2)],
      "Since this view was opened.",
    );
  }

  drawTiles(samples) {
    const value = (name) => samples.sum(name);
    const shown = (name) => (value(name) === null ? "–" : count(value(name)));
    const queried = value("fp8serve_prefix_cache_queried_tokens_total");
    const tiles = [
      ["In flight", shown("fp8serve_requests_in_flight")],
      ["Running", shown("fp8serve_requests_running")],
      ["Waiting", shown("fp8serve_requests_waiting")],
      ["Cache in use", percent(value("fp8serve_kv_cache_usage_ratio"))],
      ["Tokens/s", this.speeds.length ? count(this.speeds.at(-1)[1]) : "–"],
      [
        "Prompt tokens found in the cache",
        queried ? percent(value("fp8serve_prefix_cache_hit_tokens_total") / queried) : "–",
      ],
    ];
    renew(this.tiles, tiles, () =>
      tiles.map(([name, text]) =>
        element(
          "li",
          {},
          element("span", { className: "figure" }, text),
          element("span", { className: "quiet" }, name),
        ),
      ),
    );
  }

  drawLatency(samples) {
    const names = {
      "First token": "fp8serve_time_to_first_token_seconds",
      "Between tokens": "fp8serve_inter_token_seconds",
      "Whole request": "fp8serve_request_seconds",
    };
    const rows = Object.entries(names).map(([text, name]) => [
      text,
      seconds(samples.quantile(name, 0.5)),
      seconds(samples.quantile(name, 0.95)),
    ]);
    renew(this.latency, rows, () => [
      element("h3", {}, "How long requests take, since the start"),
      table("Latencies", ["", "Half within", "95 % within"], rows),
    ]);
  }

  drawEnds(samples) {
    const pairs = [
      ...samples.by("fp8serve_requests_finished_total", "outcome").map(([name, n]) => [`Ended: ${name}`, count(n)]),
      ...samples
        .by("fp8serve_requests_rejected_total", "reason")
        .filter(([, n]) => n)
        .map(([name, n]) => [`Refused by the bound of ${name}`, count(n)]),
      ["Engine restarts", count(samples.sum("fp8serve_engine_restarts_total") ?? 0)],
      ...samples
        .by("fp8serve_weight_swaps_total", "outcome")
        .map(([name, n]) => [`Weight swaps: ${name.replace("_", " ")}`, count(n)]),
      ["Preempted for lack of cache", count(samples.sum("fp8serve_preemptions_total") ?? 0)],
    ];
    renew(this.ends, pairs, () => [element("h3", {}, "Since the start"), facts(pairs)]);
  }

  /** Drafts are shown only for models that draft: only their engines count by the position in a draft. */
  drawDrafts(samples) {
    const of = (name) => Object.fromEntries(samples.by(`fp8serve_${name}_total`, "model"));
    const [drafts, proposed, accepted] = ["drafts", "draft_tokens", "accepted_draft_tokens"].map(of);
    const rows = Object.keys(of("accepted_draft_tokens_by_position"))
      .sort()
      .map((name) => [
        name,
        count(drafts[name] ?? 0),
        count(proposed[name] ?? 0),
        count(accepted[name] ?? 0),
        proposed[name] ? percent((accepted[name] ?? 0) / proposed[name]) : "–",
      ]);
    this.drafts.hidden = !rows.length;
    renew(this.drafts, rows, () => [
      element("h3", {}, "Drafts, since the start"),
      table("Drafts by model", ["Model", "Drafts", "Tokens proposed", "Accepted", "Share"], rows, "stacked"),
    ]);
  }

  drawTenants(samples) {
    const rows = samples
      .by("fp8serve_tenant_requests_total", "tenant")
      .map(([name, n]) => [
        name,
        count(n),
        count(Object.fromEntries(samples.by("fp8serve_tenant_requests_in_flight", "tenant"))[name] ?? 0),
      ]);
    this.tenants.hidden = rows.length < 2;
    renew(this.tenants, rows, () => [
      element("h3", {}, "Tenants"),
      table("Requests by tenant", ["Tenant", "Requests", "In flight"], rows),
    ]);
  }
}

const COLUMNS = ["Request", "Tenant", "Model", "State", "Age", "Tokens", ""];

/** The requests that are being answered, one by one, each with a button that cancels it. */
class ActiveRequests {
  constructor() {
    this.node = element("div", { className: "card", id: "under-way" });
  }

  async refresh() {
    const { requests, total } = await get("requests");
    renew(this.node, [requests, total], () => [
      element("h3", {}, "Being answered now"),
      requests.length
        ? table(
            "Requests that are being answered, oldest first",
            COLUMNS,
            requests.map((one) => this.row(one)),
            "stacked",
          )
        : element("p", { className: "quiet" }, "No request."),
      total > requests.length
        ? element("p", { className: "quiet" }, `The oldest ${count(requests.length)} of ${count(total)}.`)
        : null,
    ]);
  }

  row(one) {
    const end = button("Cancel", () => this.cancel(one), {
      report: announce,
      "aria-label": `Cancel ${one.request_id}`,
    });
    end.dataset.key = one.id;
    return [
      one.request_id,
      one.tenant,
      one.model,
      one.answers > 1 ? `${one.state}, ${count(one.answers)} answers` : one.state,
      seconds(one.age),
      `${count(one.generated_tokens)} of ${count(one.max_new_tokens)}`,
      end,
    ];
  }

  async cancel({ id, request_id: name }) {
    await post(`requests/${encodeURIComponent(id)}/cancel`);
    announce(`The request ${name} was cancelled.`);
    await this.refresh();
  }
}

// -- Prometheus text: samples by name, summed over labels, and quantiles of histograms ---------------------------------

/** [{name, labels: {}, value}] */
function parsed(text) {
  return text
    .split("\n")
    .filter((line) => line && !line.startsWith("#"))
    .map((line) => {
      const [, name, labels, value] = line.match(/^([a-zA-Z_:][\w:]*)(\{.*\})? ([^ ]+)/) ?? [];
      return { name, labels: labelsOf(labels ?? ""), value: Number(value) };
    })
    .filter((sample) => sample.name && !Number.isNaN(sample.value));
}

function labelsOf(text) {
  const matches = text.matchAll(/([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g);
  return Object.fromEntries(
    [...matches].map(([, name, value]) => [name, value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c))]),
  );
}

class Samples {
  constructor(text) {
    this.all = parsed(text);
  }

  /** The sum over all labels; null if there is no such series. */
  sum(name) {
    const samples = this.all.filter((sample) => sample.name === name);
    return samples.length ? samples.reduce((total, { value }) => total + value, 0) : null;
  }

  /** [[label, value]] of one label, in falling order. */
  by(name, label) {
    const sums = new Map();
    for (const { name: own, labels, value } of this.all)
      if (own === name && label in labels) sums.set(labels[label], (sums.get(labels[label]) ?? 0) + value);
    return [...sums].sort((a, b) => b[1] - a[1]);
  }

  /** A quantile of a histogram, interpolated within its bucket; null when nothing was observed. */
  quantile(name, q) {
    const buckets = this.by(`${name}_bucket`, "le")
      .map(([le, n]) => [le === "+Inf" ? Infinity : Number(le), n])
      .sort((a, b) => a[0] - b[0]);
    const total = buckets.at(-1)?.[1];
    if (!total) return null;
    const rank = q * total,
      i = buckets.findIndex(([, n]) => n >= rank);
    const [low, before] = i ? buckets[i - 1] : [0, 0],
      [high, n] = buckets[i];
    return high === Infinity ? low : low + ((high - low) * (rank - before)) / (n - before || 1);
  }
}
