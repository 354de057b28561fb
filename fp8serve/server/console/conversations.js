// The conversations that this browser stores, for this server alone, and the list of them. No key is in them: the page
// never sees one, the browser sends it by itself.

import { ROOT } from "./api.js";
import { button, element, renew } from "./dom.js";
import { moment } from "./numbers.js";

const PREFIX = `fp8serve chat ${ROOT.pathname}`;
const INDEX = `${PREFIX} index`;
const TITLE = 60; // characters

/** {open, list}: the id of the conversation that a reload shows, or null; {id, title, at} of all, the latest first. */
export function index() {
  const stored = parsed(INDEX);
  return Array.isArray(stored?.list) ? stored : { open: null, list: [] };
}

/** Returns the stored conversation; null if there is none with this id, or it cannot be read. */
export const read = (id) => (id === null ? null : parsed(nameOf(id)));

/** When a conversation was last written, in seconds; undefined if it is not stored. */
export const writtenAt = (id) => index().list.find((one) => one.id === id)?.at;

/**
 * Stores a conversation and makes it the open one; whether there was room. Where there is none, other conversations lose
 * the probabilities of their tokens, the oldest first, and this one last.
 */
export function write(id, title, record) {
  const others = index().list.filter((one) => one.id !== id);
  const attempts = [
    () => put(nameOf(id), record),
    ...others.toReversed().map((other) => () => shorten(other.id) && put(nameOf(id), record)),
    () => put(nameOf(id), brief(record)),
  ];
  if (!attempts.some((attempt) => attempt())) return false;
  const entry = { id, title: title.trim().slice(0, TITLE), at: Date.now() / 1000 };
  return put(INDEX, { open: id, list: [entry, ...others] });
}

/** Sets which conversation a reload shows; null is an empty one. */
export function setOpen(id) {
  const stored = index();
  if (stored.open !== id) put(INDEX, { ...stored, open: id });
}

export function remove(id) {
  const { open, list } = index();
  put(INDEX, { open: open === id ? null : open, list: list.filter((one) => one.id !== id) });
  try {
    localStorage.removeItem(nameOf(id));
  } catch {
    /* a browser that stores nothing */
  }
}

export const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;

const nameOf = (id) => `${PREFIX} ${id}`;

function parsed(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null;
  }
}

function put(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false; // the browser's limit, or a browser that stores nothing
  }
}

function shorten(id) {
  const record = read(id);
  return record !== null && put(nameOf(id), brief(record));
}

/** A conversation without the probabilities of its tokens. */
function brief({ columns, ...rest }) {
  const plain = (pieces) => [{ text: pieces.map(({ text }) => text).join("") }].filter(({ text }) => text);
  const answer = (one) => ({ ...one, content: plain(one.content), reasoning: plain(one.reasoning) });
  const turn = (one) => ({ ...one, answers: one.answers.map(answer) });
  return { ...rest, columns: columns.map((turns) => turns.map(turn)) };
}

/** The list of stored conversations, folded; hidden while there is none. */
export class List {
  /** `open`, `remove`: called with an id. */
  constructor({ open, remove }) {
    Object.assign(this, { open, remove });
    this.summary = element("summary");
    this.items = element("ul", { className: "chats" });
    this.node = element("details", { id: "chats", hidden: true }, this.summary, this.items);
  }

  /** `shown`: the id of the conversation on the page, or null. */
  draw(shown) {
    const { list } = index();
    this.node.hidden = list.length === 0;
    this.summary.textContent = `Conversations (${list.length})`;
    renew(this.items, [list, shown], () => list.map((entry) => this.item(entry, entry.id === shown)));
  }

  item({ id, title, at }, isShown) {
    const open = button(title || "(no words)", () => this.open(id), { className: "plain" });
    if (isShown) open.setAttribute("aria-current", "true");
    open.dataset.key = id;
    const forget = button("Delete", () => this.remove(id), { "aria-label": `Delete the conversation ${title}` });
    return element("li", {}, open, element("span", { className: "quiet" }, moment(at)), forget);
  }
}
