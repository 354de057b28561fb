// The server's routes. Addresses are relative to this file, so that a proxy may put the server below a path.

export const ROOT = new URL("../", import.meta.url);

/** An error with a sentence for the user. `status` is 0 if the server sent no response. */
export class Problem extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(new URL(path, ROOT), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Problem("The server does not answer.", 0);
  }
  if (!response.ok) throw await problem(response);
  return response;
}

export const get = async (path) => read(await request(path));
export const post = async (path, body = {}, options = {}) => read(await send(path, body, options));
export const remove = async (path) => read(await request(path, { method: "DELETE" }));

/** Sends a JSON body and returns the response without reading it, for a stream. */
export function send(path, data, options = {}) {
  const headers = { "Content-Type": "application/json", ...options.headers };
  return request(path, { ...options, method: "POST", headers, body: JSON.stringify(data) });
}

/** Uploads a file of training data. */
export async function upload(file) {
  const form = new FormData();
  form.append("purpose", "fine-tune");
  form.append("file", file, file.name);
  return read(await request("v1/files", { method: "POST", body: form }));
}

async function read(response) {
  try {
    return await response.json();
  } catch {
    throw new Problem("The connection broke off in the middle of an answer.", 0);
  }
}

async function problem(response) {
  let body = {};
  try {
    body = await response.json();
  } catch {
    /* a proxy's page, perhaps */
  }
  const text = typeof body.error === "object" ? body.error?.message : [body.error, body.hint].filter(Boolean).join(" ");
  return new Problem(text || `The server answered ${response.status}.`, response.status);
}

/** Server-sent events over fetch, because EventSource cannot POST: {name, id, data}, data as JSON, until [DONE]. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch(broken);
      if (done) return;
      buffer += value;
      const parts = buffer.split("\n\n");
      buffer = parts.pop();
      for (const part of parts) {
        const event = parsed(part);
        if (event === DONE) return;
        if (event) yield event;
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
