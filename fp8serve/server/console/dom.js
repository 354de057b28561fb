// The DOM in a few words. Text from the server only ever becomes text nodes: nothing here parses HTML.

const COPIED_MS = 2000;
const SVG = "http://www.w3.org/2000/svg";

/** A node. Keys with a dash become attributes, functions named `on...` listeners, everything else properties. */
export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined) continue;
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (name.includes("-") || name === "role" || name === "for") node.setAttribute(name, value);
    else node[name] = value;
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** A node of an SVG; all keys become attributes. */
export function drawn(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function labelled(text, field) {
  return element("label", {}, text, field);
}

/** A button that is disabled while its function runs, and reports the error if it fails. */
export function button(name, work, { report, ...properties } = {}) {
  const node = element("button", { type: "button", ...properties }, name);
  node.addEventListener("click", async () => {
    node.disabled = true;
    try {
      await work();
    } catch (error) {
      report?.(error.message, true);
    } finally {
      node.disabled = false;
    }
  });
  return node;
}

/** A button that copies the text that `textOf` returns. */
export function copyButton(textOf, label) {
  const node = button("Copy", () => copied(textOf()).then(() => tell("Copied")), {
    className: "copy",
    "aria-label": label,
    report: () => tell("Not copied"),
  });
  const tell = (word) => {
    node.textContent = word;
    node.setAttribute("aria-label", word);
    setTimeout(() => {
      node.textContent = "Copy";
      node.setAttribute("aria-label", label);
    }, COPIED_MS);
  };
  return node;
}

/** Browsers have a clipboard only for secure addresses; for others, a hidden field is selected and copied. */
async function copied(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = element("textarea", { value: text, className: "unseen", "aria-hidden": "true" });
  const focused = document.activeElement;
  document.body.append(field);
  field.select();
  const isDone = document.execCommand("copy");
  field.remove();
  focused?.focus();
  if (!isDone) throw new Error("This browser does not copy.");
}

/** Sets the text of a line that is read aloud when it changes; an equal text changes nothing. */
export function say(node, text, isError = false) {
  if (node.textContent !== text) node.textContent = text;
  node.classList.toggle("error", isError);
}

/**
 * Replaces the children by those that `make` gives, empty ones left out, but only when the data they are made from have
 * changed: focus and selection survive a refresh.
 */
export function renew(node, data, make) {
  const mark = JSON.stringify(data);
  if (node.mark === mark) return;
  node.mark = mark;
  const path = focusPath(node);
  node.replaceChildren(...make().filter(Boolean));
  if (path) node.querySelector(path)?.focus();
}

function focusPath(node) {
  const focused = document.activeElement;
  const name = node.contains(focused) ? focused.dataset.key : undefined;
  return name ? `[data-key="${CSS.escape(name)}"]` : null;
}

/** A list of terms and their descriptions. */
export function facts(pairs) {
  const rows = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return element(
    "dl",
    { className: "facts" },
    ...rows.map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, String(value)))),
  );
}

/** A table that a phone shows row by row: each cell carries the name of its column. */
export function table(caption, columns, rows, className = "") {
  const head = element("tr", {}, ...columns.map((name) => element("th", { scope: "col" }, name)));
  const body = rows.map((cells) =>
    element(
      "tr",
      {},
      ...cells.map((cell, i) => {
        const node = element(i ? "td" : "th", i ? {} : { scope: "row" }, ...[cell].flat());
        node.dataset.label = columns[i];
        return node;
      }),
    ),
  );
  return element(
    "table",
    { className },
    element("caption", { className: "unseen" }, caption),
    element("thead", {}, head),
    element("tbody", {}, ...body),
  );
}
