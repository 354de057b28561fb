// The frame: which view is shown, and the requests that are repeated while the page is visible.

import { get } from "./api.js";
import { element, say } from "./dom.js";
import { Chat } from "./chat.js";
import { Finetune } from "./finetune.js";
import { Models } from "./models.js";
import { Requests } from "./requests.js";
import { Scales } from "./scales.js";
import { lookAtState } from "./state.js";

const REFRESH_MS = 2000;
const VIEWS = { chat: Chat, scales: Scales, finetune: Finetune, models: Models, requests: Requests };
const NAMES = { chat: "Chat", scales: "Scales", finetune: "Fine-tune", models: "Models", requests: "Requests" };

// A view is created when it is first opened and is kept: a stream continues while another view is shown.
const views = new Map();
let shown = null;

/** `#/finetune/JOB?model=M` as {name, rest: ["JOB"], query}. */
function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/");
  return {
    name: Object.hasOwn(VIEWS, name) ? name : "chat",
    rest: rest.map(decoded),
    query: new URLSearchParams(query),
  };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

function open() {
  const { name, rest, query } = place();
  if (!views.has(name)) views.set(name, build(name));
  for (const [other, { section }] of views) section.hidden = other !== name;
  for (const link of document.querySelectorAll("#views a")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${NAMES[name]} · fp8serve`;
  const { view, section } = views.get(name);
  const moved = shown !== null && shown !== name;
  shown = name;
  view.open?.(rest, query);
  if (moved) (section.querySelector("h2").focus({ preventScroll: true }), scrollTo(0, 0));
  refresh();
}

function build(name) {
  const heading = element("h2", { tabIndex: -1, id: `h-${name}` }, NAMES[name]);
  const problem = element("p", { className: "error", role: "status" });
  const view = new VIEWS[name]();
  const attributes = { className: `view ${name}`, "aria-labelledby": heading.id };
  const section = element("section", attributes, heading, problem, view.node);
  document.getElementById("main").append(section);
  return { section, view, problem };
}

async function refresh() {
  const current = views.get(shown);
  try {
    await current.view.refresh?.();
    say(current.problem, "");
  } catch (error) {
    // the header shows faults of the whole server; this line shows the failure of this view
    say(current.problem, error.status === 0 || error.status === 503 ? "" : error.message, true);
  }
}

async function loop() {
  if (!document.hidden) {
    await lookAtState();
    await refresh();
  }
  setTimeout(loop, REFRESH_MS);
}

function links() {
  return Object.entries(NAMES).map(([name, text]) => {
    const link = element("a", { href: `#/${name}` }, text);
    link.dataset.view = name;
    return element("li", {}, link);
  });
}

document.getElementById("views").replaceChildren(...links());
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address keeps the view
  document.getElementById("main").focus();
});
addEventListener("hashchange", open);
open();
loop();
get("version").then(
  ({ version }) => {
    document.getElementById("version").textContent = `Version ${version}`;
  },
  () => {},
);
