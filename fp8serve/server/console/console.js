// The console: plain DOM, no library. Text from the server only ever becomes text nodes.
"use strict";

const $ = (id) => document.getElementById(id);
const POLL_MS = 2000;

function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

async function call(path, body) {
  const options = body === undefined ? {} : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) };
  const answer = await fetch(path, options);
  if (!answer.ok) throw new Error(await problem(answer));
  return answer;
}

async function problem(answer) {
  try {
    const said = await answer.json();
    return [said.error, said.hint].filter(Boolean).join(" ");
  } catch {
    return `The server answered ${answer.status}.`;
  }
}

function say(id, text, isError = false) {
  $(id).textContent = text;
  $(id).classList.toggle("error", isError);
}

// -- server-sent events over fetch: EventSource cannot POST

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const parts = buffer.split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5)).join("\n");
      if (data) yield JSON.parse(data);
    }
  }
}

// -- try a prompt

let running = null;

async function generate(event) {
  event.preventDefault();
  const prompt = $("prompt").value, temperature = Number($("temperature").value);
  const parameters = { max_new_tokens: Number($("tokens").value), ...(temperature > 0 && { temperature }) };
  running = new AbortController();
  $("go").disabled = true;
  $("stop").hidden = false;
  $("answer").replaceChildren(element("span", { className: "prompt" }, prompt));
  say("answer-facts", "");
  const started = performance.now();
  let count = 0, first = null;
  try {
    const answer = await fetch("/generate_stream", {
      method: "POST", signal: running.signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify({ inputs: prompt, parameters }),
    });
    if (!answer.ok) throw new Error(await problem(answer));
    for await (const item of events(answer)) {
      if (item.error) throw new Error(item.error);
      first ??= performance.now() - started;
      count += 1;
      $("answer").append(item.token.text);
    }
    const seconds = (performance.now() - started) / 1000;
    say("answer-facts", `${count} tokens, first after ${Math.round(first)} ms, ${(count / seconds).toFixed(1)} tokens/s`);
  } catch (error) {
    if (error.name === "AbortError") say("answer-facts", `Stopped after ${count} tokens.`);
    else say("answer-facts", error.message, true);
  } finally {
    $("go").disabled = false;
    $("stop").hidden = true;
  }
}

// -- fine-tune

function readRows() {
  return $("rows").value.split("\n").filter((line) => line.trim()).map((line) => {
    if (!line.trim().startsWith("{")) return { text: line };
    return JSON.parse(line);
  });
}

function tuneBody() {
  return { data: readRows(), max_steps: Number($("steps").value), learning_rate: Number($("rate").value), recipe: $("recipe").value };
}

async function startJob(event) {
  event.preventDefault();
  try {
    const job = await (await call("/finetune", tuneBody())).json();
    say("tune-note", `Started ${job.id}.`);
    watched = job.id;
    await showJobs();
  } catch (error) {
    say("tune-note", error.message, true);
  }
}

async function checkRows() {
  try {
    const report = await (await call("/finetune/validate", tuneBody())).json();
    const bad = report.bad_lines.map((line) => `line ${line.line}: ${line.message}`).join(" ");
    const share = (report.trainable_fraction * 100).toFixed(0);
    say("tune-note", bad || `${report.data.rows} rows, ${report.data.tokens} tokens, ${share} % of them learnt, ${report.steps} steps.`, Boolean(bad));
  } catch (error) {
    say("tune-note", error.message, true);
  }
}

let watched = null;

async function showJobs() {
  const { jobs } = await (await call("/finetune?limit=5")).json();
  $("jobs").replaceChildren(...jobs.map(jobLine));
  watched ??= jobs.find((job) => job.progress.step)?.id ?? null;
  if (watched) await showCurve(watched);
}

function jobLine(job) {
  const p = job.progress;
  const progress = p.step ? `step ${p.step}/${p.total_steps}, loss ${p.train_loss.toFixed(3)}` : job.error?.message ?? "";
  const line = element("li", {}, element("code", {}, job.id.slice(0, 14) + "…"), element("b", {}, job.active ? "serving" : job.status), element("span", { className: "grow" }, progress));
  line.append(action("Curve", () => { watched = job.id; return showCurve(job.id); }));
  if (["queued", "running"].includes(job.status)) line.append(action("Cancel", () => call(`/finetune/${job.id}/cancel`, {})));
  if (job.status === "succeeded" && !job.active) line.append(action("Serve it", () => call(`/finetune/${job.id}/activate`, {})));
  return line;
}

function action(name, work) {
  const button = element("button", { type: "button" }, name);
  button.addEventListener("click", async () => {
    button.disabled = true;
    say("tune-note", "");
    try { await work(); await refresh(); } catch (error) { say("tune-note", error.message, true); }
    button.disabled = false;
  });
  return button;
}

async function showCurve(id) {
  const { metrics } = await (await call(`/finetune/${id}/metrics`)).json();
  $("curve").hidden = metrics.length === 0;
  if (metrics.length) drawCurve(metrics.map((m) => [m.step, m.train_loss]));
}

function drawCurve(points) {
  const [left, right, top, bottom] = [44, 630, 10, 195];
  const losses = points.map((p) => p[1]);
  const high = Math.max(...losses), low = Math.min(...losses), span = high - low || 1, last = points.at(-1)[0];
  const x = (step) => left + ((right - left) * (step - points[0][0])) / (last - points[0][0] || 1);
  const y = (loss) => bottom - ((bottom - top) * (loss - low)) / span;
  const svg = $("curve").querySelector("svg");
  const draw = (tag, attributes, text = "") => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.textContent = text;
    return node;
  };
  const grid = [high, (high + low) / 2, low].flatMap((loss) => [
    draw("line", { class: "axis", x1: left, x2: right, y1: y(loss), y2: y(loss) }),
    draw("text", { x: left - 6, y: y(loss) + 4, "text-anchor": "end" }, loss.toFixed(2)),
  ]);
  const steps = [points[0][0], last].map((step, i) => draw("text", { x: x(step), y: 212, "text-anchor": i ? "end" : "start" }, `step ${step}`));
  const line = draw("polyline", { class: "loss", points: points.map(([s, l]) => `${x(s).toFixed(1)},${y(l).toFixed(1)}`).join(" ") });
  svg.replaceChildren(svg.querySelector("title"), ...grid, ...steps, line);
  say("curve-note", `Training loss of ${watched}: ${losses[0].toFixed(3)} at the start, ${losses.at(-1).toFixed(3)} now.`);
}

// -- scales

const number = (value) => (value === null || value === undefined ? "–" : Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(2) : value.toPrecision(4));

async function showScales() {
  const { layers, weight_version } = await (await call("/scales")).json();
  $("scales").tBodies[0].replaceChildren(...layers.map(scaleRow));
  const dynamic = layers.filter((layer) => layer.scale === null).length;
  const note = layers.length === 0 ? "These weights run in high precision: there are no scales." : dynamic === layers.length ? "These scales follow every input, so there is nothing stored to compare with." : "";
  say("scales-note", `${note} Weights: ${weight_version}.`.trim());
}

function scaleRow(layer) {
  const cut = layer.saturation > 0, tight = layer.headroom !== null && layer.headroom < 1.1;
  return element("tr", {},
    element("td", {}, layer.name), element("td", {}, number(layer.amax)), element("td", {}, number(layer.scale)),
    element("td", { className: tight ? "tight" : "" }, layer.headroom === null ? "–" : `${layer.headroom.toFixed(2)}×`),
    element("td", { className: cut ? "cut" : "" }, layer.saturation === null ? "–" : `${(100 * layer.saturation).toFixed(4)} %`));
}

// -- the whole page, again and again while it is looked at

async function showState() {
  const answer = await fetch("/health/ready");
  const said = await answer.json();
  $("state").textContent = said.state;
  $("state").className = `pill ${answer.ok ? "good" : "bad"}`;
  return answer.ok;
}

async function showModel() {
  const info = await (await call("/info")).json();
  $("model").textContent = `${info.model_id} · ${info.engine.recipe ?? ""} · ${info.engine.device ?? ""} · ${info.model_sha}`;
}

async function refresh() {
  try {
    if (await showState()) await Promise.all([showModel(), showScales(), showJobs()]);
  } catch (error) {
    $("state").textContent = error.message || "no answer";
    $("state").className = "pill bad";
  }
}

$("try").addEventListener("submit", generate);
$("stop").addEventListener("click", () => running?.abort());
$("tune").addEventListener("submit", startJob);
$("check").addEventListener("click", checkRows);

(async function loop() {
  if (!document.hidden) await refresh();
  setTimeout(loop, POLL_MS);
})();
