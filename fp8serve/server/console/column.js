// One conversation with one model: its turns, and the requests for answers and for other answers.

import { Answer, RELOADED } from "./answer.js";
import { events, Problem, send } from "./api.js";
import { element } from "./dom.js";

/** A turn: messages to the model, and the answers to them. One answer is shown, and the conversation continues from it. */
class Turn {
  /** `messages`: one message of the user, or results of tools, whose `names` are shown. */
  constructor(messages, names) {
    Object.assign(this, { messages, names });
    this.answers = [];
    this.chosen = -1;
    this.place = element("div");
    this.switch = element("p", { className: "variants", hidden: true });
    this.node = element(
      "li",
      { className: "turn" },
      ...messages.map(({ content }, i) => bubble(content, names[i])),
      this.place,
      this.switch,
    );
  }

  get record() {
    const answers = this.answers.map((answer) => answer.record);
    return { messages: this.messages, names: this.names, answers, chosen: this.chosen };
  }

  get answer() {
    return this.answers[this.chosen];
  }

  add(answer) {
    this.answers.push(answer);
    this.show(this.answers.length - 1);
  }

  show(which) {
    this.chosen = which;
    this.place.replaceChildren(this.answer.node);
    const many = this.answers.length > 1;
    this.switch.hidden = !many;
    if (!many) return;
    const step = (name, to) =>
      element(
        "button",
        {
          type: "button",
          className: "plain",
          "aria-label": `${name} answer`,
          disabled: !this.answers[to],
          onclick: () => this.show(to),
        },
        name === "Earlier" ? "‹" : "›",
      );
    this.switch.replaceChildren(
      step("Earlier", which - 1),
      ` Answer ${which + 1} of ${this.answers.length} `,
      step("Later", which + 1),
    );
  }
}

function bubble(content, name) {
  const before = name ? element("b", {}, `${name}: `) : element("span", { className: "unseen" }, "You: ");
  return element("div", { className: "said" }, before, element("span", {}, content));
}

export class Column {
  constructor(settings, changed) {
    this.settings = settings;
    this.changed = changed; // called when an answer begins or ends
    this.turns = [];
    this.running = null;
    this.log = element("ol", { className: "log", "aria-label": "Conversation" });
    this.heading = element("h3");
    this.node = element("section", { className: "column" }, this.heading, this.log);
  }

  name(model, alone) {
    this.model = model;
    this.heading.textContent = model;
    this.heading.classList.toggle("unseen", alone);
    this.node.setAttribute("aria-label", `Conversation with ${model}`);
  }

  /** Sends a new text of the user to the model. */
  ask(text) {
    return this.run(this.begin([{ role: "user", content: text }]), this.settings.parameters(0));
  }

  begin(messages, names = []) {
    const turn = new Turn(messages, names);
    this.turns.push(turn);
    this.log.append(turn.node);
    return turn;
  }

  /** Requests another answer to the last turn, with the next seed. */
  again() {
    const turn = this.turns.at(-1);
    return this.run(turn, this.settings.parameters(turn.answers.length));
  }

  stop() {
    this.running?.abort();
  }

  /** When a page is reloaded, the browser aborts its requests before it hides the page. */
  expectUnload() {
    this.isUnloading = true;
  }

  clear() {
    this.stop();
    this.turns = [];
    this.log.replaceChildren();
  }

  /** Plain data of all turns, for `restore`. */
  get record() {
    return this.turns.map((turn) => turn.record);
  }

  /** Replaces the turns by stored ones; results can still be entered for calls without a result. */
  restore(turns) {
    this.clear();
    for (const { messages, names, answers, chosen } of turns) {
      const turn = this.begin(messages, names);
      for (const answer of answers) turn.add(Answer.from(answer));
      turn.show(chosen);
    }
    const last = this.turns.at(-1);
    if (last) this.offerResults(last.answer);
    this.format();
  }

  /** Shows all answers formatted, or as they were written, according to the settings. */
  format() {
    for (const turn of this.turns) for (const answer of turn.answers) answer.format(this.settings.isFormatted);
  }

  /** The messages of `turns`, for a request or for training data. Turns without an answer that counts are left out. */
  messagesOf(turns) {
    const counted = turns.filter((turn) => turn.answer?.counts);
    return [...this.settings.opening, ...counted.flatMap((turn) => [...turn.messages, turn.answer.message])];
  }

  run(turn, parameters) {
    this.ended = this.answer(turn, parameters); // a promise, for callers that wait for the end
    return this.ended;
  }

  async answer(turn, parameters) {
    const answer = new Answer();
    turn.add(answer);
    this.running = new AbortController();
    this.isUnloading = false;
    this.log.setAttribute("aria-busy", "true"); // an answer is read aloud when it is complete, not word by word
    this.changed();
    answer.node.scrollIntoView({ block: "nearest" });
    try {
      await this.stream(turn, parameters, answer);
      answer.finish();
    } catch (error) {
      if (error.name === "AbortError") answer.stop();
      else if (this.isUnloading) answer.stop(RELOADED);
      else answer.fail(error.message);
    } finally {
      this.running = null;
      answer.format(this.settings.isFormatted);
      this.log.setAttribute("aria-busy", "false");
      this.offerResults(answer);
      this.changed();
    }
  }

  async stream(turn, parameters, answer) {
    const text = this.settings.isText;
    const earlier = this.turns.slice(0, this.turns.indexOf(turn));
    const body = text
      ? { model: this.model, prompt: turn.messages[0].content, ...parameters }
      : { model: this.model, messages: [...this.messagesOf(earlier), ...turn.messages], ...parameters };
    const response = await send(text ? "v1/completions" : "v1/chat/completions", body, { signal: this.running.signal });
    for await (const { data } of events(response)) {
      if (data.error) throw new Problem(data.error.message ?? String(data.error), 500);
      const low = nearEnd();
      answer.take(data);
      if (low) scrollTo(0, document.documentElement.scrollHeight);
    }
    if (!answer.end) throw new Problem("The stream ended before the answer did.", 0);
  }

  /** A form in which a person enters the results of the called tools. */
  offerResults(answer) {
    if (answer.state !== "done" || !answer.calls.length) return;
    const fields = answer.calls.map((call) =>
      element("textarea", {
        rows: 2,
        required: true,
        "aria-label": `Result of ${call.function.name}`,
        placeholder: `Result of ${call.function.name}`,
      }),
    );
    const form = element("form", { className: "results" }, ...fields, element("button", {}, "Send results"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      form.remove();
      const messages = answer.calls.map((call, i) => ({
        role: "tool",
        tool_call_id: call.id,
        content: fields[i].value,
      }));
      const names = answer.calls.map((call) => call.function.name);
      this.run(this.begin(messages, names), this.settings.parameters(0));
    });
    answer.node.append(form);
    form.scrollIntoView({ block: "nearest" });
  }
}

/** Whether the page is scrolled to its end, so that it should follow new text. */
function nearEnd() {
  return document.documentElement.scrollHeight - scrollY - innerHeight < 120;
}
