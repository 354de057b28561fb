// Training and validation data of a fine-tune: rows that are typed, or files on the server.

import { get, remove, upload } from "./api.js";
import { button, element, labelled, renew, say } from "./dom.js";
import { bytes } from "./numbers.js";

const EXAMPLE =
  '{"prompt": "The capital of France is", "completion": " Paris."}\n{"prompt": "The capital of Italy is", "completion": " Rome."}';

export class JobData {
  constructor() {
    this.source = element("select", { id: "data-source", onchange: () => this.update() });
    this.validation = element("select", { id: "validation-source" });
    this.rows = element("textarea", {
      id: "rows",
      rows: 5,
      spellcheck: false,
      value: EXAMPLE,
      "aria-label": "Rows: one text a line, or one JSON object a line",
    });
    this.file = element("input", {
      id: "file",
      type: "file",
      accept: ".jsonl,.ndjson,.json,.txt,.md,.csv,.tsv,.parquet,.gz",
      onchange: () => this.send(),
    });
    this.note = element("p", { className: "quiet", role: "status", id: "file-note" });
    this.forget = button("Delete this file", () => this.drop(), {
      report: (text, isError) => say(this.note, text, isError),
      hidden: true,
    });
    this.node = element(
      "div",
      {},
      element(
        "div",
        { className: "row" },
        labelled("Learn from", this.source),
        labelled("Validate on", this.validation),
        labelled("Upload a file (JSON lines, text, CSV, Parquet)", this.file),
        this.forget,
      ),
      this.note,
      this.rows,
    );
    this.show([]);
    onRow((line) => this.add(line));
  }

  add(line) {
    const present = this.rows.value === EXAMPLE ? "" : this.rows.value.trimEnd();
    this.rows.value = present ? `${present}\n${line}` : line;
    this.source.value = "";
    this.update();
  }

  async refresh() {
    this.show((await get("v1/files")).data);
  }

  show(files) {
    const options = () =>
      files.map((file) => element("option", { value: file.id }, `${file.filename || file.id} (${bytes(file.bytes)})`));
    const chosen = [this.source.value, this.validation.value];
    renew(this.source, files, () => [element("option", { value: "" }, "rows typed below"), ...options()]);
    renew(this.validation, files, () => [element("option", { value: "" }, "nothing"), ...options()]);
    const known = (id) => files.some((file) => file.id === id);
    [this.source.value, this.validation.value] = chosen.map((id) => (known(id) ? id : ""));
    this.update();
  }

  update() {
    this.rows.hidden = this.source.value !== "";
    this.forget.hidden = this.source.value === "";
  }

  async send() {
    const [file] = this.file.files;
    if (!file) return;
    say(this.note, `Uploading ${file.name}, ${bytes(file.size)}.`);
    try {
      const { id } = await upload(file);
      await this.refresh();
      this.source.value = id;
      say(this.note, `${file.name} is on the server.`);
    } catch (error) {
      say(this.note, error.message, true);
    }
    this.file.value = "";
    this.update();
  }

  async drop() {
    await remove(`v1/files/${encodeURIComponent(this.source.value)}`);
    say(this.note, "The file was deleted. Jobs that used it keep their copy.");
    await this.refresh();
  }

  /** The fields of a request. Throws an Error that says what is missing. */
  get values() {
    const validation = this.validation.value ? { validation_file_id: this.validation.value } : {};
    if (this.source.value) return { file_id: this.source.value, ...validation };
    const rows = rowsOf(this.rows.value);
    if (rows.length === 0) throw new Error("There are no rows: type some, or upload a file.");
    return { data: rows, ...validation };
  }
}

// -- rows: one JSON object a line, or one plain text a line --------------------------------------------------------------

const followers = new Set();
const waiting = []; // until the view Fine-tune is first opened

export function addRow(row) {
  const line = JSON.stringify(row);
  if (followers.size === 0) waiting.push(line);
  for (const follower of followers) follower(line);
}

/** Calls `follower` with every row that another view adds. */
function onRow(follower) {
  followers.add(follower);
  waiting.splice(0).forEach(follower);
}

/** The rows of a text. Throws an Error that names the line. */
function rowsOf(text) {
  return text
    .split("\n")
    .map((line, i) => [line, i + 1])
    .filter(([line]) => line.trim())
    .map(([line, number]) => {
      if (!line.trim().startsWith("{")) return { text: line };
      try {
        return JSON.parse(line);
      } catch (error) {
        throw new Error(`Line ${number} is not JSON: ${error.message}.`);
      }
    });
}
