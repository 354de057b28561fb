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
  if (job.status === "succeeded" && !job.active) line.append(action("Serve it", () => swapTo(job.id, job.fine_tuned_model)));
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

// -- which weights serve

let swapping = null; // what this page asked for: {model, since}

async function showWeights() {
  const { served, available, activating } = await (await call("/models")).json();
  const select = $("weights"), chosen = select.value === select.dataset.served ? null : select.value;
  const options = available.map(({ source, model }) => {
    const name = source === "base" ? `${model} (base model)` : model;
    return element("option", { value: source }, source === served?.source ? `${name}: serving` : name);
  });
  select.replaceChildren(...options);
  select.value = available.some(({ source }) => source === chosen) ? chosen : served?.source ?? "base";
  select.dataset.served = served?.source ?? "base";
  $("serve").disabled = Boolean(activating) || select.value === served?.source;
  if (activating) say("weights-note", `Loading ${activating.model}: ${Math.round(activating.seconds)} s. The present weights serve until it is ready.`);
  else if (!swapping && $("weights-note").textContent.startsWith("Loading")) say("weights-note", "");
}

async function swapTo(source, model) {
  swapping = { model, since: performance.now() };
  const ticking = setInterval(() => {
    const seconds = Math.round((performance.now() - swapping.since) / 1000);
    say("weights-note", `Loading ${model}: ${seconds} s. The present weights serve until it is ready.`);
  }, 500);
  say("weights-note", `Loading ${model}. The present weights serve until it is ready.`);
  $("serve").disabled = true;
  try {
    const name = encodeURIComponent((await (await call("/models")).json()).alias);
    const [path, body] = source === "base" ? [`/models/${name}/activate`, { source }] : [`/finetune/${source}/activate`, {}];
    const { served } = await (await call(path, body)).json();
    say("weights-note", `Now serving ${served.model}.`);
  } catch (error) {
    say("weights-note", error.message, true);
  } finally {
    clearInterval(ticking);
    swapping = null;
  }
}

async function serveChosen() {
  const option = $("weights").selectedOptions[0];
  await swapTo(option.value, option.textContent);
  await refresh();
}

// -- scales

const SOME = 0.001, MANY = 0.01; // shares cut off: the largest values of some tokens always are

const number = (value) => (value === null || value === undefined ? "–" : Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3) ? value.toExponential(2) : value.toPrecision(4));

async function showScales() {
  const { layers, weight_version } = await (await call("/scales")).json();
  $("scales").tBodies[0].replaceChildren(...layers.map(scaleRow));
  say("scales-note", `${scalesNote(layers)} Weights: ${weight_version}.`.trim());
}

function scalesNote(layers) {
  if (layers.length === 0) return "These weights run in high precision: there are no scales.";
  if (layers.every((layer) => layer.scale === null)) return "These scales follow every input, so there is nothing stored to compare with.";
  const cut = layers.filter((layer) => layer.saturation >= SOME).sort((a, b) => b.saturation - a.saturation);
  if (cut.length === 0) return `No layer of ${layers.length} cuts off ${percent(SOME)} or more of its input.`;
  return `${cut.length} of ${layers.length} layers cut off ${percent(SOME)} or more of their input, ${cut[0].name} the most: ${percent(cut[0].saturation)}.`;
}

const percent = (share) => `${Number((100 * share).toPrecision(3))} %`;

function scaleRow(layer) {
  const share = layer.saturation ?? null, level = share >= MANY ? "many" : share >= SOME ? "some" : "";
  const cell = (label, text, className = "") => {
    const node = element("td", { className }, text);
    node.dataset.label = label;
    return node;
  };
  return element("tr", {},
    cell("", layer.name), cell("amax", number(layer.amax)), cell("scale", number(layer.scale)),
    cell("headroom", layer.headroom === null ? "–" : `${layer.headroom.toFixed(2)}×`),
    cell("cut off", share === null ? "–" : percent(share), level));
}

// -- the whole page, again and again while it is looked at

async function showState() {
  const answer = await fetch("/health/ready");
  const said = await answer.json();
  $("state").textContent = said.state;
  $("state").className = `pill ${answer.ok ? "good" : "bad"}`;
  return said.state;
}

async function showModel() {
  const info = await (await call("/info")).json();
  $("model").textContent = `${info.model_id} · ${info.engine.recipe ?? ""} · ${info.engine.device ?? ""} · ${info.model_sha}`;
}

async function refresh() {
  try {
    const state = await showState();
    say("page-note", STATES[state] ?? "");
  } catch (error) {
    $("state").textContent = error.message || "no answer";
    $("state").className = "pill bad";
    return;
  }
  // each part for itself: what cannot be shown now keeps what it showed last
  await Promise.allSettled([showModel(), showScales(), showJobs(), showWeights()]);
}

const STATES = {
  paused: "A fine-tune job has the device; prompts are answered again when it has ended.",
  loading: "The model is loading.",
  restarting: "The engine is starting again.",
  draining: "The server is shutting down.",
};

$("try").addEventListener("submit", generate);
$("stop").addEventListener("click", () => running?.abort());
$("tune").addEventListener("submit", startJob);
$("check").addEventListener("click", checkRows);
$("serve").addEventListener("click", serveChosen);
$("weights").addEventListener("change", showWeights);

(async function loop() {
  if (!document.hidden) await refresh();
  setTimeout(loop, POLL_MS);
})();
