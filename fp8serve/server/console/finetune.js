// Fine-tuning: data, options, a dry run, the jobs, and one job in detail.

import { get, post } from "./api.js";
import { button, element, renew, say } from "./dom.js";
import { JobData } from "./job_data.js";
import { JobFields } from "./job_fields.js";
import { JobPanel } from "./job_panel.js";
import { bytes, count, percent } from "./numbers.js";

const LISTED = 20;
const TO_ALLOW = "Start the server with --train-on share, --train-on pause or --train-device to run jobs.";

export class Finetune {
  constructor() {
    this.data = new JobData();
    this.fields = new JobFields();
    this.panel = new JobPanel();
    this.note = element("p", { id: "tune-note", className: "quiet", role: "status" });
    this.refusal = element("p", { id: "refusal", className: "refusal", hidden: true });
    this.sample = element(
      "details",
      { className: "part", hidden: true },
      element("summary", {}, "The first row as the model sees it; what is learnt is marked"),
      element("p", { className: "text" }),
    );
    const report = (text, isError) => say(this.note, text, isError);
    this.start = element("button", { id: "start", "aria-describedby": "refusal" }, "Start");
    this.check = button("Check only", () => this.validate(), { id: "check", report });
    this.form = element(
      "form",
      { className: "card", noValidate: true },
      element("h3", {}, "A new job"),
      this.data.node,
      this.fields.node,
      this.refusal,
      element("div", { className: "row" }, this.start, this.check),
      this.note,
      this.sample,
    );
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (!this.start.disabled) this.submit(); // Enter in a field submits, too
    });
    this.jobs = element("ul", { id: "jobs", className: "jobs" });
    this.list = element("div", { className: "card" }, element("h3", {}, "Jobs"), this.jobs);
    this.node = element("div", {}, this.form, element("div", { className: "sides" }, this.list, this.panel.node));
  }

  open([id]) {
    this.linked = id;
  }

  /** Requests once whether this server runs jobs. If it does not, the form says why and offers only a check. */
  async checkWhetherJobsRun() {
    if (this.refused !== undefined) return;
    const info = await get("info").catch(() => null); // an API key without access to /info may still be allowed to start jobs
    if (info === null) return;
    this.refused = info.training_refused !== null;
    this.panel.refused = this.refused;
    this.start.disabled = this.refused;
    this.refusal.hidden = !this.refused;
    if (this.refused) this.refusal.textContent = `${info.training_refused} ${TO_ALLOW}`;
  }

  async refresh() {
    await Promise.all([this.fields.load(), this.checkWhetherJobsRun()]);
    const { jobs } = await get(`finetune?limit=${LISTED}`);
    await this.data.refresh();
    const busy = jobs.find((job) => job.status === "running");
    const shown = this.linked ?? this.panel.id ?? busy?.id ?? jobs[0]?.id;
    if (shown) this.panel.watch(shown);
    renew(this.jobs, [shown, jobs.map((job) => [job.id, job.status, job.active, job.progress.step])], () =>
      jobs.length
        ? jobs.map((job) => line(job, job.id === shown))
        : [element("li", { className: "quiet" }, "No job yet.")],
    );
    await this.panel.refresh();
  }

  get body() {
    return { ...this.data.values, ...this.fields.values };
  }

  async submit() {
    this.start.disabled = true;
    this.sample.hidden = true;
    say(this.note, "");
    try {
      const job = await post("finetune", this.body);
      say(this.note, `Started ${job.id}.`);
      location.hash = `#/finetune/${job.id}`;
    } catch (error) {
      say(this.note, error.message, true);
    }
    this.start.disabled = false;
  }

  async validate() {
    say(this.note, "Reading the rows.");
    this.sample.hidden = true;
    const report = await post("finetune/validate", this.body);
    const bad = report.bad_lines.map(({ line, message }) => (line ? `Row ${line}: ${message}` : message)).join(" ");
    const more =
      report.bad_line_count > report.bad_lines.length
        ? ` And ${count(report.bad_line_count - report.bad_lines.length)} more.`
        : "";
    const memory = Object.values(report.memory_bytes).reduce((sum, size) => sum + size, 0);
    const learnt = `${count(report.data.tokens)} tokens, ${percent(report.trainable_fraction)} of them learnt`;
    const good = `${count(report.data.rows)} rows, ${learnt}, ${count(report.steps)} steps, about ${bytes(memory)} of memory.`;
    say(this.note, bad ? bad + more : good, Boolean(bad));
    this.sample.hidden = report.sample.length === 0;
    this.sample.lastChild.replaceChildren(
      ...report.sample.map(([text, learnt]) => element(learnt ? "mark" : "span", {}, text)),
    );
  }
}

function line(job, isShown) {
  const { step, total_steps: total } = job.progress;
  const link = element(
    "a",
    { href: `#/finetune/${encodeURIComponent(job.id)}`, ...(isShown && { "aria-current": "true" }) },
    job.fine_tuned_model ?? job.id,
  );
  link.dataset.key = job.id;
  const status = element(
    "b",
    { className: `status ${job.active ? "good" : job.status}` },
    job.active ? "serving" : job.status,
  );
  return element(
    "li",
    {},
    link,
    status,
    element("span", { className: "quiet" }, total ? `step ${count(step)} of ${count(total)}` : ""),
  );
}
