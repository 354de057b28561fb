// Fields for the numbers of a fine-tune, made from the server's own description of `POST /finetune`. A field that is
// left empty is not sent, so the trainer uses its default, which the placeholder shows.

import { get } from "./api.js";
import { element } from "./dom.js";

const FIRST = ["recipe", "epochs", "max_steps", "learning_rate", "batch_size", "seq_len", "suffix"];
const ELSEWHERE = ["data", "file_id", "validation_data", "validation_file_id", "model"];

export class JobFields {
  constructor() {
    this.read = [];
    this.first = element("div", { className: "row" });
    this.rest = element("div", { className: "row" });
    this.node = element(
      "div",
      {},
      this.first,
      element("details", {}, element("summary", {}, "More options"), this.rest),
    );
  }

  /** Requests the description once; after a failure, the next call tries again. */
  async load() {
    if (this.read.length) return;
    const { components } = await get("openapi.json");
    if (this.read.length) return;
    const properties = components.schemas.FinetuneBody.properties;
    const others = Object.keys(properties).filter((name) => !FIRST.includes(name) && !ELSEWHERE.includes(name));
    for (const name of FIRST) this.first.append(this.field(name, properties[name]));
    for (const name of others) this.rest.append(this.field(name, properties[name]));
  }

  field(name, schema) {
    const choices = [schema, ...(schema.anyOf ?? [])];
    const plain = choices.find(({ type }) => type && type !== "null") ?? schema;
    const values = choices.find((choice) => choice.enum)?.enum;
    const input = values ? select(values, schema.default) : typed(plain, schema.default);
    input.id = `job-${name}`;
    input.title = schema.description ?? "";
    this.read.push(() => [name, valueOf(name, input, plain, values)]);
    return element("label", {}, name.replaceAll("_", " "), input);
  }

  /** The fields that were filled in. Throws an Error that names a field which cannot be read. */
  get values() {
    return Object.fromEntries(this.read.map((one) => one()).filter(([, value]) => value !== undefined));
  }
}

function select(values, preset) {
  return element(
    "select",
    {},
    element("option", { value: "" }, preset === null || preset === undefined ? "unset" : `${preset} (default)`),
    ...values.filter((value) => value !== preset).map((value) => element("option", {}, value)),
  );
}

function typed(schema, preset) {
  const isNumber = ["integer", "number"].includes(schema.type);
  const shown =
    preset === null || preset === undefined || preset === ""
      ? ""
      : typeof preset === "object"
        ? JSON.stringify(preset)
        : String(preset);
  return element("input", {
    type: isNumber ? "number" : "text",
    placeholder: shown,
    ...(isNumber && {
      step: schema.type === "integer" ? 1 : "any",
      min: schema.minimum ?? "",
      max: schema.maximum ?? "",
    }),
  });
}

function valueOf(name, input, schema, values) {
  if (input.validity.badInput) throw new Error(`${name} needs a number.`);
  const text = input.value.trim();
  if (text === "") return undefined;
  if (values || schema.type === "string") return text;
  if (["integer", "number"].includes(schema.type)) return Number(text);
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name} is not JSON: ${error.message}.`);
  }
}
