// A subset of Markdown as DOM nodes: headings, lists, quotes, rules, emphasis, code. HTML, links, images and tables stay
// text as it is written: an answer can neither become markup nor lead anywhere.
//
// The source is never copied: a range of it becomes nodes by `leaf(from, to)`, so that tokens keep their probabilities.
// Every loop goes through its text once, and nesting ends at DEEPEST, whatever a model writes.

import { copyButton, element } from "./dom.js";

const DEEPEST = 8; // of lists and quotes in each other
const OPEN = 32; // marks of emphasis that wait for their other half

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;

/** Nodes for `text`. `leaf(from, to)`: nodes for that range of it. */
export function markdown(text, leaf) {
  const lines = [];
  let from = 0;
  for (const line of text.split("\n")) {
    lines.push({ from, to: from + line.length, text: line });
    from += line.length + 1;
  }
  return blocks(lines, { text, leaf }, 0);
}

/** `lines`: {from, to, text}, without what belongs to the blocks around them. */
function blocks(lines, source, depth) {
  const nodes = [];
  for (let at = 0; at < lines.length; ) {
    const [taken, node] = block(lines, at, source, depth);
    if (node) nodes.push(node);
    at += taken;
  }
  return nodes;
}

/** The block that begins at `lines[at]`: how many lines it takes, and its node. */
function block(lines, at, source, depth) {
  const line = lines[at];
  if (!line.text.trim()) return [1, null];
  const fence = line.text.match(FENCE);
  if (fence) return code(lines, at, fence, source);
  if (RULE.test(line.text)) return [1, element("hr")];
  const heading = line.text.match(HEADING);
  if (heading) {
    const level = { role: "heading", "aria-level": String(Math.min(6, heading[1].length + 2)) }; // below the view's own
    return [1, element("p", { className: "heading", ...level }, ...inline([cut(line, heading[0].length)], source))];
  }
  if (depth < DEEPEST && QUOTE.test(line.text)) return quote(lines, at, source, depth);
  if (depth < DEEPEST && ITEM.test(line.text)) return list(lines, at, source, depth);
  let end = at + 1;
  while (end < lines.length && !begins(lines[end].text, depth)) end += 1;
  return [end - at, element("p", {}, ...inline(lines.slice(at, end), source))];
}

/** Whether a line cannot go on with the paragraph before it. */
function begins(text, depth) {
  if (!text.trim() || FENCE.test(text) || RULE.test(text) || HEADING.test(text)) return true;
  return depth < DEEPEST && (QUOTE.test(text) || ITEM.test(text));
}

const cut = (line, by) => ({ from: line.from + by, to: line.to, text: line.text.slice(by) });
const indent = (text) => text.match(/^ */)[0].length;

/** Up to the closing fence, or the end: an answer may be cut off within its code. */
function code(lines, at, [, fence, info], source) {
  const closing = new RegExp(`^ {0,3}\\${fence[0]}{${fence.length},}[ \\t]*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end].text)) end += 1;
  const inner = lines.slice(at + 1, end);
  const copy = copyButton(() => inner.map(({ text }) => text).join("\n"), "Copy the code");
  const head = element("div", { className: "code-head" }, element("span", {}, info.trim().split(/\s/)[0]), copy);
  return [Math.min(end + 1, lines.length) - at, element("div", { className: "code" }, head, pre(inner, source))];
}

function pre(lines, { leaf }) {
  const withBreak = ({ from, to }, i) => leaf(from, i < lines.length - 1 ? to + 1 : to);
  return element("pre", {}, element("code", {}, ...lines.flatMap(withBreak)));
}

function quote(lines, at, source, depth) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end].text)) end += 1;
  const inner = lines.slice(at, end).map((line) => cut(line, line.text.match(QUOTE)[0].length));
  return [end - at, element("blockquote", {}, ...blocks(inner, source, depth + 1))];
}

/** Items of one kind at one indentation; what is indented further belongs to the item above it. */
function list(lines, at, source, depth) {
  const [, margin, mark] = lines[at].text.match(ITEM);
  const isNumbered = /\d/.test(mark);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const { text } = lines[end];
    const [, spaces, sign, gap] = (indent(text) <= margin.length + 1 && !RULE.test(text) && text.match(ITEM)) || [];
    if (sign !== undefined && /\d/.test(sign) === isNumbered) {
      const width = spaces.length + sign.length + Math.min(gap.length, 4);
      items.push({ width, lines: [cut(lines[end], Math.min(width, text.length))] });
    } else if (text.trim() && indent(text) > margin.length + 1) {
      const { width, lines: own } = items.at(-1);
      own.push(cut(lines[end], Math.min(indent(text), width)));
    } else if (!text.trim()) {
      let next = end + 1;
      while (next < lines.length && !lines[next].text.trim()) next += 1;
      if (next === lines.length || !goesOn(lines[next].text, margin.length, isNumbered)) break;
      items.at(-1).lines.push(...lines.slice(end, next).map((line) => cut(line, line.text.length)));
      end = next - 1;
    } else if (begins(text, depth) || !lines[end - 1].text.trim()) break;
    else items.at(-1).lines.push(lines[end]); // the paragraph of the item continues without an indentation
    end += 1;
  }
  const start = isNumbered ? { start: parseInt(mark, 10) } : {};
  const node = element(isNumbered ? "ol" : "ul", start);
  node.append(...items.map((item) => element("li", {}, ...blocks(item.lines, source, depth + 1))));
  return [end - at, node];
}

/** Whether a list continues with a line that follows empty lines. */
function goesOn(text, margin, isNumbered) {
  if (indent(text) > margin + 1) return true;
  const sign = text.match(ITEM)?.[2];
  return sign !== undefined && !RULE.test(text) && /\d/.test(sign) === isNumbered;
}

/** Nodes for lines of a paragraph, with emphasis and code in them. */
function inline(lines, source) {
  const reader = new Inline(source);
  lines.forEach((line, i) => {
    reader.read(line);
    if (i < lines.length - 1) reader.keep(line.to, line.to + 1); // the line break
  });
  return reader.nodesOf(reader.items);
}

class Inline {
  constructor({ text, leaf }) {
    Object.assign(this, { text, leaf });
    this.items = []; // ranges {from, to}, of which those with a `mark` of emphasis wait for another, and {node}
    this.waiting = []; // the places of marks that wait
    this.unpaired = new Set(); // runs of backticks without another half on their line
  }

  read(line) {
    const pattern = /\\[!-/:-@[-`{-~]|`+|\*+|_+/g;
    const text = this.text.slice(0, line.to); // a search ends with the line
    let at = (pattern.lastIndex = line.from);
    for (let match; (match = pattern.exec(text)); pattern.lastIndex = at) {
      const [mark] = match;
      this.keep(at, match.index);
      at = match.index + mark.length;
      if (mark[0] === "\\") this.keep(at - 1, at);
      else if (mark[0] === "`") at = this.code(mark, match.index, text);
      else if (mark.length > (mark[0] === "*" ? 3 : 1)) this.keep(match.index, at); // such as __init__
      else this.emphasis(mark, match.index, line);
    }
    this.keep(at, line.to);
  }

  /** Takes in a range as it is written. */
  keep(from, to) {
    const last = this.items.at(-1);
    if (last?.to === from && last.mark === undefined) last.to = to;
    else if (from < to) this.items.push({ from, to });
  }

  /** Code between two equal runs of backticks, of which the first begins at `from`; where it ends. */
  code(mark, from, text) {
    const begin = from + mark.length;
    const closing = new RegExp(`(?<!\`)${mark}(?!\`)`, "g");
    closing.lastIndex = begin;
    const run = `${text.length} ${mark.length}`;
    const other = this.unpaired.has(run) ? null : closing.exec(text);
    if (!other) {
      this.unpaired.add(run);
      this.keep(from, begin);
      return begin;
    }
    this.items.push({ node: element("code", {}, ...this.leaf(begin, other.index)) });
    return other.index + mark.length;
  }

  /** A mark closes what an equal one has opened, or opens something itself, or is text. */
  emphasis(mark, from, line) {
    const to = from + mark.length;
    const before = from > line.from ? this.text[from - 1] : " ";
    const after = to < line.to ? this.text[to] : " ";
    const isWithin = mark.length === 1 && isWord(before) && isWord(after);
    const opener = this.waiting.findLastIndex((place) => this.items[place].mark === mark);
    if (opener >= 0 && !isSpace(before) && !isWithin) {
      const [place] = this.waiting.splice(opener);
      const inside = this.items.splice(place).slice(1);
      this.items.push({ node: emphasized(mark.length, this.nodesOf(inside)) });
    } else if (isSpace(after) || isWithin || this.waiting.length >= OPEN) {
      this.keep(from, to);
    } else {
      this.waiting.push(this.items.length);
      this.items.push({ from, to, mark });
    }
  }

  nodesOf(items) {
    return items.flatMap(({ node, from, to }) => (node ? [node] : this.leaf(from, to)));
  }
}

/** One mark is emphasis, two are strong, three are both. */
function emphasized(marks, nodes) {
  if (marks === 1) return element("em", {}, ...nodes);
  return element("strong", {}, ...(marks === 3 ? [element("em", {}, ...nodes)] : nodes));
}

const isSpace = (char) => /\s/.test(char);
const isWord = (char) => /[\p{L}\p{N}_]/u.test(char);
