// The tokens of an answer and their probabilities: laid along its text, and shown in a box, under the pointer or, for the
// keyboard, at the token that the arrow keys have reached.
//
// A server sends tokens with the text they are of, but an answer's text may come later (what could have become a tool
// call is held back) and some tokens have none (marks around reasoning). So tokens wait here until their text comes.

import { element } from "./dom.js";
import { percent } from "./numbers.js";

/** {text, logprob, top: [[text, logprob]]}; a character made of several tokens is one of these, with their sum. */
export class TokenQueue {
  constructor() {
    this.waiting = [];
    this.decoder = new TextDecoder("utf-8", { ignoreBOM: true }); // keeps the beginning of a character
    this.parts = 0; // tokens of that character
    this.logprob = 0; // their sum
  }

  /** Of /v1/chat/completions: `choices[0].logprobs.content`. */
  addChat(entries) {
    for (const { bytes, logprob, token, top_logprobs: top } of entries)
      this.add(
        bytes ?? [],
        logprob,
        token,
        top.map((item) => [item.token, item.logprob]),
      );
  }

  /** Of /v1/completions: `choices[0].logprobs`. */
  addText({ tokens, token_logprobs: logprobs, top_logprobs: top }) {
    tokens.forEach((token, i) => this.add(bytesOf(token), logprobs[i], token, Object.entries(top[i] ?? {})));
  }

  add(bytes, logprob, name, top) {
    this.parts += 1;
    this.logprob += logprob ?? 0;
    const text = this.decoder.decode(new Uint8Array(bytes), { stream: true });
    if (bytes.length && !text) return;
    const alone = this.parts === 1;
    if (text) this.waiting.push({ text, name: alone ? name : text, logprob: this.logprob, top: alone ? top : [] });
    this.parts = this.logprob = 0;
  }

  /** Cuts `text` into pieces: tokens, where they are known to stand there, and plain texts. */
  cut(text) {
    const pieces = [];
    while (text) {
      const at = this.waiting.findIndex((token) => text.startsWith(token.text));
      if (at < 0) return [...pieces, { text }];
      const [token] = this.waiting.splice(0, at + 1).slice(-1);
      pieces.push(token);
      text = text.slice(token.text.length);
    }
    return pieces;
  }
}

function bytesOf(token) {
  if (!token.startsWith("bytes:")) return [...new TextEncoder().encode(token)];
  return token
    .slice(6)
    .split("\\x")
    .slice(1)
    .map((pair) => parseInt(pair, 16));
}

// -- the box -----------------------------------------------------------------------------------------------------------

const box = element("div", { className: "hover", hidden: true, "aria-hidden": "true" });
const spoken = element("p", { className: "unseen", role: "status" });
const tokens = new WeakMap();
document.body.append(box, spoken);

/** A span for a piece of text that may be a token (tokens.js). */
export function tokenSpan(piece) {
  const span = element("span", {}, piece.text);
  if (piece.logprob === undefined) return span;
  const p = Math.exp(piece.logprob);
  span.className = `token ${p < 0.1 ? "rare" : p < 0.5 ? "unsure" : ""}`.trim();
  tokens.set(span, piece);
  return span;
}

/** Shows the probabilities of the tokens in `area` at the pointer, and by the arrow keys when `area` has the focus. */
export function showTokensOn(area) {
  area.addEventListener("pointerover", (event) => (tokens.has(event.target) ? show(event.target) : hide()));
  area.addEventListener("pointerleave", hide);
  area.addEventListener("blur", () => {
    mark(area, null);
    hide();
  });
  area.addEventListener("keydown", (event) => step(area, event));
}

/** Makes `area` reachable by keyboard once it holds a token. */
export function makeReachable(area) {
  if (area.tabIndex === 0 || !area.querySelector(".token")) return;
  area.tabIndex = 0;
  area.setAttribute("role", "group");
  area.setAttribute("aria-label", "Answer. The arrow keys tell the probability of each token.");
}

function step(area, event) {
  const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (event.key === "Escape") {
    mark(area, null);
    hide();
  }
  if (by === undefined) return;
  event.preventDefault();
  const all = [...area.querySelectorAll(".token")];
  const now = all.indexOf(area.querySelector(".current"));
  const next = all[Math.min(all.length - 1, Math.max(0, now + by))];
  mark(area, next);
  show(next);
  spoken.textContent = sentence(tokens.get(next));
}

function mark(area, span) {
  area.querySelector(".current")?.classList.remove("current");
  span?.classList.add("current");
}

function sentence({ name, logprob, top }) {
  const others = top
    .filter(([text]) => text !== name)
    .map(([text, value]) => `${visible(text)} ${percent(Math.exp(value))}`);
  return `${visible(name)} ${percent(Math.exp(logprob))}${others.length ? `; else ${others.join(", ")}` : ""}`;
}

/** Makes spaces and line breaks visible. */
const visible = (text) => JSON.stringify(text);

function show(span) {
  const { name, logprob, top } = tokens.get(span);
  const rows = top.length ? top : [[name, logprob]];
  if (!rows.some(([text]) => text === name)) rows.push([name, logprob]);
  box.replaceChildren(element("table", {}, ...rows.map(([text, value]) => row(text, value, text === name))));
  box.hidden = false;
  place(span.getClientRects()[0] ?? span.getBoundingClientRect());
}

function row(text, logprob, chosen) {
  const share = Math.exp(logprob);
  return element(
    "tr",
    { className: chosen ? "chosen" : "" },
    element("td", {}, visible(text)),
    element("td", {}, element("meter", { value: share })),
    element("td", {}, percent(share)),
  );
}

/** Below the token, or above it where there is no room; never outside of the window. */
function place(at) {
  const { offsetWidth: width, offsetHeight: height } = box;
  const left = Math.max(4, Math.min(at.left, document.documentElement.clientWidth - width - 4));
  const top = at.bottom + height + 6 > innerHeight ? at.top - height - 4 : at.bottom + 4;
  box.style.left = `${left}px`;
  box.style.top = `${Math.max(4, top)}px`;
}

/** Hides the box, because its token may be removed. */
export function hide() {
  box.hidden = true;
}

addEventListener("scroll", hide, { passive: true, capture: true });
