// Whether the server answers, which models it offers, and the line below the header that shows its state.

import { get, ROOT } from "./api.js";
import { say } from "./dom.js";

const $ = (id) => document.getElementById(id);
const SHOWN_MS = 60_000;
const SENTENCES = {
  paused: "A fine-tune job has the device: prompts are answered again when it has ended. Everything else goes on.",
  loading: "The model is loading.",
  restarting: "The engine is starting again.",
  draining: "The server is shutting down.",
  lost: "The server does not answer. This page tries again every two seconds; what is on it stays.",
};

let state = null;
let result = { text: "", isError: false }; // of the last action
let fading;
const followers = new Set();
export let models = [];

/** Calls `follower` with the list of `/v1/models` now and whenever it changes. */
export function onModels(follower) {
  followers.add(follower);
  follower(models);
}

/** Requests the state and the models. Never fails: "no answer" is a state. */
export async function lookAtState() {
  show(await ready());
  if (state === "lost") return;
  const { data } = await get("v1/models").catch(() => ({ data: models }));
  if (JSON.stringify(data) === JSON.stringify(models)) return;
  models = data;
  $("model").textContent = models[0]?.id ?? "";
  for (const follower of followers) follower(models);
}

async function ready() {
  try {
    const answer = await fetch(new URL("health/ready", ROOT), { cache: "no-store" });
    return (await answer.json()).state;
  } catch {
    return "lost";
  }
}

function show(now) {
  const back = state === "lost" && now !== "lost";
  state = now;
  const pill = $("state");
  say(pill, now === "lost" ? "no answer" : now);
  pill.className = `pill ${now === "ready" ? "good" : "bad"}`;
  if (back) announce("The server answers again.");
  else line();
}

/** Shows the result of an action in the line below the header; an empty text removes it. */
export function announce(text, isError = false) {
  result = { text, isError };
  clearTimeout(fading);
  if (text && !isError) fading = setTimeout(() => announce(""), SHOWN_MS);
  line();
}

function line() {
  const text = SENTENCES[state] ?? result.text;
  say($("notice"), text, text === result.text && result.isError);
  $("notice").hidden = text === "";
}
