// The chat: one text box, one or two columns, and the buttons for a conversation.

import { ChatSettings } from "./chat_settings.js";
import { Column } from "./column.js";
import * as conversations from "./conversations.js";
import { button, element, say } from "./dom.js";
import { addRow } from "./job_data.js";
import { announce } from "./state.js";

const HINT =
  "Point at a word of an answer, or reach it by Tab and the arrow keys, to see how probable it was and what else could have " +
  "stood there. Words that were less probable than 50 % are underlined. Conversations stay in this browser until you delete " +
  "them in the list.";

export class Chat {
  constructor() {
    this.allColumns = [];
    this.columns = []; // the first of `allColumns`, which are shown
    this.area = element("div", { className: "columns" });
    this.note = element("p", { className: "quiet", role: "status" });
    this.prompt = element("textarea", {
      id: "prompt",
      rows: 3,
      required: true,
      "aria-label": "Your message",
      placeholder: "Your message. Enter sends it, Shift and Enter begin a new line.",
    });
    this.composer();
    this.hint = element("p", { className: "quiet hint" }, HINT);
    const format = () => this.allColumns.forEach((column) => column.format());
    this.settings = new ChatSettings(() => this.arrange(), format);
    this.list = new conversations.List({ open: (id) => this.show(id), remove: (id) => this.remove(id) });
    this.id = null; // the id of the shown conversation; null until it is stored
    this.stored = {}; // {at, text} of the version that this tab last read or wrote
    this.load(conversations.index().open);
    this.list.draw(this.id);
    this.node = element("div", {}, this.list.node, this.settings.node, this.hint, this.area, this.form);
    this.settings.begin();
    addEventListener("pagehide", () => this.store());
    addEventListener("beforeunload", () => this.allColumns.forEach((column) => column.expectUnload()));
    addEventListener("storage", () => this.list.draw(this.id)); // another tab has changed the storage
  }

  /** Shows a stored conversation, unless another version of this page wrote it. */
  load(id) {
    const record = conversations.read(id);
    if (!record) return;
    try {
      this.settings.restore(record.settings);
      record.columns.forEach((turns, i) => (this.allColumns[i] ?? this.addColumn()).restore(turns));
      this.id = id;
      this.stored = { at: conversations.writtenAt(id), text: JSON.stringify(this.record) };
    } catch {
      for (const column of this.allColumns) column.clear();
      conversations.remove(id);
    }
  }

  get record() {
    return { settings: this.settings.record, columns: this.allColumns.map((column) => column.record) };
  }

  /** Stores the conversation. If another tab has written it meanwhile, this tab's version becomes a new conversation. */
  store() {
    if (!this.begun) return;
    const { record } = this;
    const text = JSON.stringify(record);
    if (text === this.stored.text) return conversations.setOpen(this.id);
    const at = conversations.writtenAt(this.id);
    if (at !== undefined && at !== this.stored.at) {
      this.id = null;
      announce("Another tab has gone on with this conversation. What this tab shows is now a conversation of its own.");
    }
    this.id ??= conversations.newId();
    const title = this.allColumns.find((column) => column.turns.length).turns[0].messages[0].content;
    if (conversations.write(this.id, title, record)) this.stored = { at: conversations.writtenAt(this.id), text };
    else if (!this.busy)
      say(this.note, "This browser has no room for the conversation: a reload ends it. Delete others from the list.");
    this.list.draw(this.id);
  }

  /** Stops running answers, stores the conversation with them, and clears the columns. */
  async leave() {
    for (const column of this.allColumns) column.stop();
    await Promise.all(this.allColumns.map((column) => column.ended));
    this.store();
    for (const column of this.allColumns) column.clear();
    Object.assign(this, { id: null, stored: {} });
    say(this.note, "");
  }

  async show(id) {
    if (id === this.id) return;
    await this.leave();
    conversations.setOpen(id);
    this.load(id);
    this.list.draw(this.id);
    this.arrange();
    this.prompt.focus();
  }

  async remove(id) {
    if (id === this.id) await this.leave();
    conversations.remove(id);
    this.list.draw(this.id);
    this.update();
  }

  addColumn() {
    this.allColumns.push(new Column(this.settings, () => this.update()));
    return this.allColumns.at(-1);
  }

  get begun() {
    return this.columns.some((column) => column.turns.length > 0);
  }

  composer() {
    const report = (text, isError) => say(this.note, text, isError);
    this.sendButton = element("button", { id: "go" }, "Send");
    this.stopButton = element(
      "button",
      { id: "stop", type: "button", hidden: true, onclick: () => this.stop() },
      "Stop",
    );
    this.againButton = button("Regenerate", () => this.again(), { id: "again", report });
    this.newButton = button("New conversation", () => this.restart(), { id: "new", report });
    this.trainButton = button("Use as training data", () => this.train(), { id: "train-on-this", report });
    this.downloadButton = button("Download", () => this.download(), { id: "download", report });
    this.tools = element(
      "div",
      { className: "row tools" },
      this.sendButton,
      this.stopButton,
      this.againButton,
      this.newButton,
      this.trainButton,
      this.downloadButton,
    );
    this.form = element("form", { className: "composer" }, this.prompt, this.tools, this.note);
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.busy) this.form.requestSubmit();
    });
  }

  open(_, query) {
    if (query.has("model")) this.settings.compareWith(query.get("model"));
  }

  /** Shows a column for each chosen model; a conversation stays in its column when the model changes. */
  arrange() {
    const names = this.settings.chosen;
    const number = Math.max(1, names.length);
    while (this.allColumns.length < number) this.addColumn();
    for (const column of this.allColumns.slice(number)) column.stop(); // and keeps its turns until the column is shown again
    this.columns = this.allColumns.slice(0, number);
    this.columns.forEach((column, i) => column.name(names[i] ?? "", number === 1));
    this.area.replaceChildren(...this.columns.map((column) => column.node));
    this.area.classList.toggle("two", number > 1);
    this.update();
  }

  /** Says so if the same weights answered in both columns. */
  warn() {
    const weights = this.columns.map((column) => column.turns.at(-1)?.answer?.weights);
    const isOne = weights.length === 2 && weights[0] !== undefined && weights[0] === weights[1];
    say(this.note, isOne && !this.busy ? `Both columns were answered by the same weights, ${weights[0]}.` : "");
  }

  get busy() {
    return this.columns.some((column) => column.running !== null);
  }

  update() {
    const { begun } = this;
    this.sendButton.disabled = this.busy;
    this.stopButton.hidden = !this.busy;
    this.hint.hidden = begun;
    if (begun) this.warn();
    this.store();
    for (const one of [this.againButton, this.newButton, this.trainButton, this.downloadButton]) one.hidden = !begun;
    for (const one of [this.againButton, this.trainButton, this.downloadButton]) one.disabled = this.busy;
  }

  submit() {
    const text = this.prompt.value;
    if (this.busy || !text.trim()) return;
    if (!this.settings.chosen.length) return say(this.note, "There is no model that writes text here yet.", true);
    try {
      this.settings.parameters(0);
    } catch (error) {
      return say(this.note, error.message, true);
    }
    say(this.note, "");
    this.prompt.value = "";
    for (const column of this.columns) column.ask(text);
  }

  stop() {
    for (const column of this.columns) column.stop();
    this.prompt.focus(); // the button is about to be hidden
  }

  async again() {
    await Promise.all(this.columns.filter((column) => column.turns.length).map((column) => column.again()));
  }

  async restart() {
    await this.leave();
    conversations.setOpen(null);
    this.list.draw(null);
    this.update();
    this.prompt.focus();
  }

  /** Returns the first column's conversation as a row for training. Throws an Error if it cannot be one. */
  row() {
    const messages = this.columns[0].messagesOf(this.columns[0].turns);
    if (!messages.some((message) => message.role === "assistant"))
      throw new Error("There is no answer yet that could be learnt.");
    if (messages.some((message) => message.role === "tool" || message.tool_calls))
      throw new Error("A conversation with tool calls cannot be training data yet.");
    if (this.settings.isText) return { prompt: messages.at(-2).content, completion: messages.at(-1).content };
    return { messages: messages.map(({ role, content }) => ({ role, content })) };
  }

  train() {
    addRow(this.row());
    say(this.note, "");
    announce("The conversation of the first column is now a row of the training data in the view Fine-tune.");
  }

  download() {
    const text = `${JSON.stringify(this.row())}\n`;
    const url = URL.createObjectURL(new Blob([text], { type: "application/jsonl" }));
    element("a", { href: url, download: "conversation.jsonl" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
  }
}
