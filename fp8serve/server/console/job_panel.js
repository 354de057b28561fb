// One fine-tune job: its progress, its losses as they arrive, its checkpoints, and its buttons.

import { events, get, post, remove, request, ROOT } from "./api.js";
import { Chart } from "./chart.js";
import { button, element, facts, renew, say, table } from "./dom.js";
import { count, moment, number, seconds } from "./numbers.js";
import { announce } from "./state.js";
import { load, serve, wayBack } from "./swap.js";

const MESSAGES = 100;
const RETRY_MS = 2000;

export class JobPanel {
  constructor() {
    this.refused = false; // whether this server runs no jobs
    this.heading = element("h3");
    this.status = element("p", { id: "job-status", role: "status" });
    this.progress = element("progress", { "aria-label": "Steps done", max: 1, value: 0 });
    this.numbers = element("div");
    this.actions = element("div", { className: "row", id: "job-actions" });
    this.chart = new Chart("Loss by step");
    this.csv = element("a", { hidden: true, download: "" }, "Metrics of every step, as CSV");
    this.checkpoints = element("div");
    this.log = element("ol", { className: "events" });
    const history = element("details", {}, element("summary", {}, "What happened"), this.log);
    this.node = element(
      "div",
      { className: "card", id: "job", hidden: true },
      this.heading,
      this.status,
      this.progress,
      this.numbers,
      this.actions,
      this.chart.node,
      element("p", {}, this.csv),
      this.checkpoints,
      history,
    );
  }

  /** Shows another job from its first event on. */
  watch(id) {
    if (this.id === id) return;
    this.stop?.();
    Object.assign(this, { id, metrics: [], written: 0 });
    this.log.replaceChildren();
    this.chart.draw([]);
    this.csv.href = new URL(`finetune/${encodeURIComponent(id)}/metrics?format=csv`, ROOT);
    this.csv.hidden = true;
    this.stop = follow(
      id,
      (event) => this.take(event),
      () => this.refresh().catch(() => {}),
    );
  }

  take(event) {
    if (event.type === "metrics") {
      while (this.metrics.at(-1)?.step >= event.data.step) this.metrics.pop(); // a run that diverged went back
      this.metrics.push(event.data);
      this.csv.hidden = false;
    }
    if (event.type === "checkpoint") this.written += 1;
    if (event.type !== "metrics") {
      this.log.append(
        element("li", { className: event.level }, element("time", {}, moment(event.created_at)), ` ${event.message}`),
      );
      while (this.log.children.length > MESSAGES) this.log.firstChild.remove();
    }
    this.due ??= setTimeout(() => {
      this.due = undefined;
      this.drawLosses();
    }, 100);
  }

  drawLosses() {
    const points = (name) =>
      this.metrics.filter((one) => typeof one[name] === "number").map((one) => [one.step, one[name]]);
    const [train, valid] = [points("train_loss"), points("valid_loss")];
    const ends = (name, all) =>
      all.length
        ? `${name}: ${number(all[0][1])} at step ${all[0][0]}, ${number(all.at(-1)[1])} at step ${all.at(-1)[0]}.`
        : "";
    this.chart.draw(
      [
        { name: "training loss", kind: "first", points: train },
        { name: "validation loss", kind: "second", points: valid },
      ],
      [ends("Training loss", train), ends("Validation loss", valid)].filter(Boolean).join(" "),
    );
  }

  async refresh() {
    if (!this.id) return;
    const id = this.id;
    const [job, models, { checkpoints }] = await Promise.all([
      get(`finetune/${encodeURIComponent(id)}`),
      get("models").catch(() => null),
      get(`finetune/${encodeURIComponent(id)}/checkpoints`),
    ]);
    if (id === this.id) this.show(job, models, checkpoints);
  }

  show(job, models, checkpoints) {
    this.node.hidden = false;
    say(this.heading, job.fine_tuned_model ?? `Job ${job.id}`);
    say(this.status, statusOf(job, checkpoints), job.status === "failed");
    const { step, total_steps: total } = job.progress;
    this.progress.hidden = !total;
    if (total) Object.assign(this.progress, { max: total, value: step });
    renew(this.numbers, [job.progress, job.status], () => [jobFacts(job)]);
    renew(
      this.actions,
      [
        [job.status, job.active, job.cancel_requested, job.pause_requested, this.refused],
        [models?.served, models?.models, models?.activating !== null],
      ],
      () => this.buttons(job, models),
    );
    renew(this.checkpoints, [checkpoints, job.status, job.active], () =>
      checkpoints.length ? [element("h4", {}, "Checkpoints"), this.table(job, checkpoints)] : [],
    );
  }

  buttons(job, models) {
    const path = `finetune/${encodeURIComponent(job.id)}`;
    const then = (work) => () => work().then(() => this.refresh());
    const off = Boolean(models?.activating);
    const back = models?.served?.source === job.id && wayBack(models?.served, models?.available[0].model);
    const isLoaded = job.active || models?.models?.some((model) => model.served?.source === job.id);
    const isDone = job.status === "succeeded";
    const act = (name, work, properties = {}) => button(name, then(work), { report: announce, ...properties });
    const isOpen = ["queued", "running", "paused"].includes(job.status) && !job.cancel_requested;
    const hasEnded = ["succeeded", "failed", "cancelled"].includes(job.status);
    const canPause = isOpen && job.status !== "paused" && !job.pause_requested;
    const canResume = isOpen ? !canPause : job.status === "failed";
    return [
      canPause && act("Pause", () => post(`${path}/pause`)),
      canResume && act("Go on from the last checkpoint", () => post(`${path}/resume`), { disabled: this.refused }),
      isOpen && act("Cancel", () => post(`${path}/cancel`)),
      isDone && !isLoaded && act("Serve it", () => serve(job.id, job.fine_tuned_model), { disabled: off }),
      isDone && !isLoaded && models?.models && act("Load it beside its base", () => load(job.id, job.fine_tuned_model)),
      isLoaded && element("a", { href: `#/chat?model=${encodeURIComponent(job.fine_tuned_model)}` }, "Compare in chat"),
      hasEnded && !job.active && button("Delete", () => this.drop(job), { report: announce }),
      back && act(`Roll back to ${back.model}`, () => serve(back.source, back.model, back.base), { disabled: off }),
    ].filter(Boolean);
  }

  /** Deletes the job and its files after a confirmation. */
  async drop(job) {
    const name = job.fine_tuned_model ?? job.id;
    if (!confirm(`Delete ${name}, with its result and its checkpoints?`)) return;
    await remove(`finetune/${encodeURIComponent(job.id)}`);
    this.stop?.();
    this.id = undefined;
    this.node.hidden = true;
    announce(`${name} was deleted.`);
    location.hash = "#/finetune";
  }

  table(job, checkpoints) {
    const isAdapter = Boolean(job.config.lora_rank);
    const beside = (step, name) =>
      button("Load", () => load(`${job.id}:ckpt-step-${step}`, name), {
        report: announce,
        "aria-label": `Load ${name} beside its base`,
      });
    const rows = checkpoints.map(({ step, model, created_at: time, metrics }, i) => [
      `step ${step}`,
      moment(time),
      number(metrics.train_loss),
      number(metrics.valid_loss),
      i === 0 && job.status === "succeeded"
        ? job.active
          ? "serving"
          : "the result"
        : isAdapter
          ? ""
          : beside(step, model),
    ]);
    return table(
      "Checkpoints, newest first",
      ["Checkpoint", "Written", "Training loss", "Validation loss", ""],
      rows,
      "stacked",
    );
  }
}

function statusOf(job, checkpoints) {
  const { step, total_steps: total } = job.progress;
  const at = total ? `, step ${count(step)} of ${count(total)}` : "";
  if (job.status === "failed") return `Failed${at}. ${job.error?.message ?? ""}`;
  if (job.status === "running" && job.cancel_requested) return `Ending${at}.`;
  if (job.status === "running" && job.pause_requested) return `Pausing${at}.`;
  const words = {
    paused: `Paused${at}.`,
    queued: "Waits for its turn.",
    running: `Running${at}.`,
    succeeded: job.active ? `Done${at}, and serving.` : `Done${at}.`,
    cancelled: `Cancelled${at}.${checkpoints.length ? " Its checkpoints stay." : ""}`,
  };
  return words[job.status] ?? job.status;
}

function jobFacts(job) {
  const p = job.progress,
    duration = job.started_at && job.finished_at ? job.finished_at - job.started_at : null;
  const rest =
    job.status === "running" && p.step
      ? ((Date.now() / 1000 - job.started_at) / p.step) * (p.total_steps - p.step)
      : null;
  return facts([
    ["Base", job.base_model],
    ["Recipe", job.config.recipe],
    ["Training loss", p.train_loss === undefined ? null : number(p.train_loss)],
    ["Validation loss", p.valid_loss === undefined ? null : number(p.valid_loss)],
    ["Tokens/s", p.tokens_per_second ? count(p.tokens_per_second) : null],
    ["Learnt tokens", p.trained_tokens ? count(p.trained_tokens) : null],
    ["Took", duration === null ? null : seconds(duration)],
    ["Left, about", rest === null ? null : seconds(rest)],
  ]);
}

/**
 * Calls `take` with every event of a job, earlier ones included, and `ended` once the job has ended. A broken connection
 * is opened again. Returns a function that stops this.
 */
function follow(id, take, ended) {
  const control = new AbortController();
  let after = 0;
  (async () => {
    while (!control.signal.aborted) {
      try {
        const response = await request(`finetune/${encodeURIComponent(id)}/events?after=${after}`, {
          headers: { Accept: "text/event-stream" },
          signal: control.signal,
        });
        for await (const { name, id: number, data } of events(response)) {
          if (control.signal.aborted) return;
          if (name === "end") return ended();
          after = Number(number);
          take(data);
        }
      } catch (error) {
        const isRefusal = error.status >= 400 && error.status < 500 && error.status !== 429;
        if (isRefusal) return; // the request for the job itself shows the reason
      }
      await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    }
  })();
  return () => control.abort();
}
