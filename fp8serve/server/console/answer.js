// One answer as it grows: reasoning and tool calls as folded parts, text as tokens, and a line of facts below. Once it is
// whole its text is formatted, in which every token keeps its probability.

import { copyButton, element, say } from "./dom.js";
import { markdown } from "./markdown.js";
import { count, seconds } from "./numbers.js";
import { hide, makeReachable, showTokensOn, TokenQueue, tokenSpan } from "./tokens.js";

const ENDS = { length: "cut off at the limit of new tokens", tool_calls: "waits for the results of its calls" };
export const RELOADED = "Stopped, because the page was loaded again.";

export class Answer {
  constructor() {
    this.started = performance.now();
    this.queue = new TokenQueue();
    this.content = "";
    this.reasoning = "";
    this.pieces = []; // of the content
    this.thoughts = []; // of the reasoning
    this.calls = []; // in the format of /v1/chat/completions
    this.state = "running"; // then done, stopped or failed
    this.text = element("div", { className: "text" });
    this.folded = element("div");
    this.facts = element("p", { className: "quiet facts-line" });
    this.copy = copyButton(() => this.content, "Copy the answer");
    this.copy.hidden = true;
    const foot = element("div", { className: "foot" }, this.facts, this.copy);
    this.node = element("div", { className: "answer" }, this.folded, this.text, foot);
    showTokensOn(this.text);
  }

  /** Adds one chunk of a stream of either route. */
  take(chunk) {
    this.model = chunk.model ?? this.model;
    this.weights = chunk.system_fingerprint ?? this.weights;
    this.usage = chunk.usage ?? this.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    this.first ??= performance.now() - this.started;
    if (choice.logprobs?.content) this.queue.addChat(choice.logprobs.content);
    else if (choice.logprobs?.tokens) this.queue.addText(choice.logprobs);
    const delta = choice.delta ?? { content: choice.text };
    if (delta.reasoning_content) this.addReasoning(delta.reasoning_content);
    if (delta.content) this.addText(delta.content);
    for (const piece of delta.tool_calls ?? []) this.addCall(piece);
    this.end = choice.finish_reason ?? this.end;
  }

  addText(text) {
    this.showText(this.queue.cut(text));
  }

  /** Appends `pieces` of the content, which TokenQueue has cut. */
  showText(pieces) {
    this.content += textOf(pieces);
    this.pieces.push(...pieces);
    this.text.append(...pieces.map(tokenSpan));
    makeReachable(this.text);
  }

  addReasoning(text) {
    this.showReasoning(this.queue.cut(text));
  }

  showReasoning(pieces) {
    if (!this.reasoning) {
      this.thought = element("div", { className: "text" });
      showTokensOn(this.thought);
      this.folded.prepend(element("details", { className: "part" }, element("summary", {}, "Reasoning"), this.thought));
    }
    this.reasoning += textOf(pieces);
    this.thoughts.push(...pieces);
    this.thought.append(...pieces.map(tokenSpan));
    makeReachable(this.thought);
  }

  addCall({ index, id, function: piece }) {
    const call = (this.calls[index] ??= this.newCall(id));
    call.function.name += piece.name ?? "";
    call.function.arguments += piece.arguments ?? "";
    call.summary.textContent = `Calls ${call.function.name}`;
    call.shown.textContent = indented(call.function.arguments);
  }

  newCall(id) {
    const [summary, shown] = [element("summary"), element("pre")];
    this.folded.append(element("details", { className: "part call", open: true }, summary, shown));
    return { id, type: "function", function: { name: "", arguments: "" }, summary, shown };
  }

  finish() {
    this.state = "done";
    const tokens = this.usage?.completion_tokens;
    const duration = (performance.now() - this.started) / 1000;
    const speed = tokens > 1 && duration > 0 ? `${(tokens / duration).toFixed(1)} tokens/s` : null;
    const parts = [
      tokens !== undefined && `${count(tokens)} tokens`,
      this.first !== undefined && `first after ${seconds(this.first / 1000)}`,
      speed,
      ENDS[this.end],
      this.weights && `weights ${this.weights}`,
    ];
    say(this.facts, parts.filter(Boolean).join(" · "));
    if (!this.content && !this.calls.length)
      this.text.append(element("span", { className: "quiet" }, "(an empty answer)"));
  }

  stop(why = "Stopped.") {
    this.state = "stopped";
    say(this.facts, this.content ? `${why} What came so far is a part of the conversation.` : why);
  }

  fail(sentence) {
    this.state = "failed";
    say(this.facts, `${sentence} This turn is not a part of the conversation.`, true);
  }

  /** Shows an answer that has ended as formatted Markdown, or as it was written. */
  format(isFormatted) {
    if (this.state === "running" || !this.content) return;
    this.copy.hidden = false;
    const nodes = isFormatted ? markdown(this.content, rangesOf(this.pieces)) : [];
    this.text.classList.toggle("formatted", nodes.length > 0);
    this.text.replaceChildren(...(nodes.length ? nodes : this.pieces.map(tokenSpan)));
    hide();
  }

  /** Plain data from which `Answer.from` restores the answer. */
  get record() {
    return {
      state: this.state,
      weights: this.weights,
      facts: this.facts.textContent,
      content: this.pieces,
      reasoning: this.thoughts,
      calls: this.calls.map(({ id, function: called }) => ({ id, function: called })),
    };
  }

  /** Restores an answer after a reload. A reload stops an answer that was not complete. */
  static from({ state, weights, facts, content, reasoning, calls }) {
    const answer = new Answer();
    answer.weights = weights;
    if (reasoning.length) answer.showReasoning(reasoning);
    answer.showText(content);
    calls.forEach((call, index) => answer.addCall({ ...call, index }));
    if (state === "running") answer.stop(RELOADED);
    else {
      answer.state = state;
      say(answer.facts, facts, state === "failed");
    }
    return answer;
  }

  /** Whether the conversation can continue from this answer. */
  get counts() {
    return this.state === "done" || (this.state === "stopped" && this.content !== "");
  }

  /** The answer as a message of the next request. */
  get message() {
    const calls = this.calls.map(({ id, type, function: { name, arguments: text } }) => ({
      id,
      type,
      function: { name, arguments: text },
    }));
    const whole = this.state === "done" && calls.length > 0;
    return {
      role: "assistant",
      content: this.content,
      ...(this.reasoning && { reasoning_content: this.reasoning }),
      ...(whole && { tool_calls: calls }),
    };
  }
}

const textOf = (pieces) => pieces.map(({ text }) => text).join("");

/** Returns a function (from, to) that returns spans for that range of the pieces' text; a part of a token is a token, too. */
function rangesOf(pieces) {
  let end = 0;
  const ends = pieces.map(({ text }) => (end += text.length));
  return (from, to) => {
    const spans = [];
    for (let i = firstAbove(ends, from), at = from; at < to; i += 1) {
      const begin = ends[i] - pieces[i].text.length;
      spans.push(tokenSpan({ ...pieces[i], text: pieces[i].text.slice(at - begin, to - begin) }));
      at = ends[i];
    }
    return spans;
  };
}

/** Returns the first index of a sorted list whose value is above `value`. */
function firstAbove(sorted, value) {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > value) high = middle;
    else low = middle + 1;
  }
  return low;
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
