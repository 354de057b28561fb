// The server's routes. Addresses are relative to this file, so that a proxy may put the server below a path.

export const ROOT = new URL("../", import.meta.url);

/** What the server said in refusal, in its own sentence. `status`: 0 when there was no answer at all. */
export class Problem extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export async function ask(path, options = {}) {
  let answer;
  try {
    answer = await fetch(new URL(path, ROOT), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server does not answer.", 0);
  }
  if (!answer.ok) throw await problem(answer);
  return answer;
}

export const get = async (path) => read(await ask(path));
export const post = async (path, body = {}, options = {}) => read(await send(path, body, options));
export const remove = async (path) => read(await ask(path, { method: "DELETE" }));

/** The answer to a JSON body, unread: for a stream. */
export function send(path, body, options = {}) {
  const headers = { "Content-Type": "application/json", ...options.headers };
  return ask(path, { ...options, method: "POST", headers, body: JSON.stringify(body) });
}

/** Uploads a file of training data. */
export async function upload(file) {
  const form = new FormData();
  form.append("purpose", "fine-tune");
  form.append("file", file, file.name);
  return read(await ask("v1/files", { method: "POST", body: form }));
}

async function read(answer) {
  try {
    return await answer.json();
  } catch {
    throw new Problem("The connection broke off in the middle of an answer.", 0);
  }
}

async function problem(answer) {
  let said = {};
  try {
    said = await answer.json();
  } catch {
    /* a proxy's page, perhaps */
  }
  const text = typeof said.error === "object" ? said.error?.message : [said.error, said.hint].filter(Boolean).join(" ");
  return new Problem(text || `The server answered ${answer.status}.`, answer.status);
}

/** Server-sent events over fetch, because EventSource cannot POST: {name, id, data}, data as JSON, until [DONE]. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(broken);
      if (done) return;
      buffer += value;
      const parts = buffer.split("\n\n");
      buffer = parts.pop();
      for (const part of parts) {
        const found = parsed(part);
        if (found === DONE) return;
        if (found) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // a reader that leaves early ends the request
  }
}

function broken(error) {
  if (error.name === "AbortError") throw error;
  throw new Problem("The connection to the server was lost.", 0);
}

const DONE = Symbol("the end of a stream");

function parsed(part) {
  const fields = { data: [] };
  for (const line of part.split("\n")) {
    const [, name, value] = line.match(/^(data|event|id): ?(.*)$/) ?? [];
    if (name === "data") fields.data.push(value);
    else if (name) fields[name] = value;
  }
  const data = fields.data.join("\n");
  if (data === "[DONE]") return DONE;
  return data ? { name: fields.event, id: fields.id, data: JSON.parse(data) } : null;
}
