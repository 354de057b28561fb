// The settings of a chat that are sent with its messages: models, sampling parameters, tools.

import { element, labelled } from "./dom.js";
import { onModels } from "./state.js";

const TOP = 5; // alternatives beside each token; /v1/completions has no more
const MAX_TOKENS = 256;
const TOOLS_HINT =
  '[{"type": "function", "function": {"name": "weather", "description": "…", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]';

export class ChatSettings {
  /** `changed` is called when other models are chosen, `format` when the setting for Markdown changes. */
  constructor(changed, format) {
    this.changed = changed;
    this.model = element("select", { id: "chat-model", onchange: changed });
    this.other = element("select", { id: "chat-other", onchange: changed });
    this.mode = element(
      "select",
      { id: "chat-mode" },
      element("option", { value: "chat" }, "Conversation"),
      element("option", { value: "text" }, "Plain text"),
    );
    this.system = element("textarea", { id: "chat-system", rows: 2 });
    this.temperature = numeric("chat-temperature", { min: 0, max: 2, step: 0.1, value: 0.7 });
    this.topP = numeric("chat-top-p", { min: 0, max: 1, step: 0.05, value: 1 });
    this.tokens = numeric("chat-tokens", { min: 1, step: 1, value: MAX_TOKENS });
    this.seed = numeric("chat-seed", { min: 0, step: 1, value: 0 });
    this.likely = element("input", { id: "chat-likely", type: "checkbox", checked: true });
    this.markdown = element("input", { id: "chat-markdown", type: "checkbox", checked: true, onchange: format });
    this.tools = element("textarea", { id: "chat-tools", rows: 3, placeholder: TOOLS_HINT, spellcheck: false });
    this.node = element("div", { className: "settings" }, this.first(), this.rest());
  }

  /** Updates the lists of models whenever the server's models change. */
  begin() {
    onModels((models) => this.offer(models));
  }

  first() {
    return element(
      "div",
      { className: "row" },
      labelled("Model", this.model),
      labelled("Beside it", this.other),
      labelled("Mode", this.mode),
    );
  }

  rest() {
    const sampling = [
      labelled("Temperature", this.temperature),
      labelled("Top-p", this.topP),
      labelled("New tokens", this.tokens),
      labelled("Seed", this.seed),
    ];
    const likely = element("label", { className: "tick" }, this.likely, "Token probabilities");
    const markdown = element("label", { className: "tick" }, this.markdown, "Format Markdown");
    this.system.setAttribute("aria-describedby", "chat-system-note");
    return element(
      "details",
      {},
      element("summary", {}, "Settings: system prompt, sampling, tools"),
      labelled("System prompt", this.system),
      element("div", { className: "row" }, ...sampling, likely, markdown),
      labelled("Tools, as a JSON list in OpenAI's form", this.tools),
      element(
        "p",
        { className: "quiet", id: "chat-system-note" },
        "Both columns get the same prompt, the same parameters and the same seed. A system prompt and tools are for conversations.",
      ),
    );
  }

  /** Lists the models of `/v1/models` that write text; a chosen model that is still listed stays chosen. */
  offer(models) {
    this.offered = models;
    const chosen = new Set(this.chosen); // a chosen model stays listed while its engine is restarted
    const names = models
      .filter((model) => writes(model) && (model.state !== "loading" || chosen.has(model.id)))
      .map((model) => model.id);
    const options = (chosen) =>
      names.map((name) => element("option", { value: name, selected: name === chosen }, name));
    const unloaded = models.filter((model) => model.state === "available");
    const later = unloaded.map(({ id }) => element("option", { value: id, disabled: true }, `${id}: not loaded`));
    const [model, other] = [this.pendingModel ?? this.model.value, this.pendingOther ?? this.other.value];
    this.model.replaceChildren(...options(model));
    if (names.includes(model)) this.pendingModel = undefined;
    this.other.replaceChildren(element("option", { value: "" }, "No other model"), ...options(other), ...later);
    if (names.includes(other)) this.pendingOther = undefined;
    const length = models[0]?.max_model_len;
    const isPreset = Number(this.tokens.value) === MAX_TOKENS;
    if (length && isPreset) this.tokens.value = Math.min(MAX_TOKENS, Math.floor(length / 2));
    this.changed();
  }

  /** Puts `name` into the second column, now or when the server offers it. */
  compareWith(name) {
    this.pendingOther = name;
    if ([...this.other.options].some((option) => option.value === name && !option.disabled)) {
      this.other.value = name;
      this.pendingOther = undefined;
      this.changed();
    }
  }

  /** The chosen settings as plain data, for `restore`. */
  get record() {
    const fields = Object.entries(this.fields).map(([name, field]) => [name, field.value]);
    const [model, other] = [this.pendingModel ?? this.model.value, this.pendingOther ?? this.other.value];
    return {
      ...Object.fromEntries(fields),
      model,
      other,
      likely: this.likely.checked,
      markdown: this.markdown.checked,
    };
  }

  /** Models are chosen again when the server offers them. */
  restore({ likely, markdown, model, other, ...values }) {
    for (const [name, field] of Object.entries(this.fields)) if (name in values) field.value = values[name];
    this.likely.checked = likely;
    this.markdown.checked = markdown;
    this.pendingModel = model;
    this.pendingOther = other || undefined;
    if (!other) this.other.value = "";
    if (this.offered) this.offer(this.offered);
  }

  get fields() {
    const { model, mode, system, temperature, topP, tokens, seed, tools } = this;
    return { model, mode, system, temperature, topP, tokens, seed, tools };
  }

  /** The names of the models in the columns. */
  get chosen() {
    return [this.model.value, this.other.value].filter(Boolean);
  }

  get isFormatted() {
    return this.markdown.checked && !this.isText;
  }

  get isText() {
    return this.mode.value === "text";
  }

  /**
   * The body of a request without its model and messages. `nth`: of several answers to one prompt; each has a seed of
   * its own. Throws an Error that says which field is wrong.
   */
  parameters(nth) {
    const body = {
      stream: true,
      stream_options: { include_usage: true },
      max_tokens: whole(this.tokens, "New tokens"),
      temperature: real(this.temperature, "Temperature"),
      top_p: real(this.topP, "Top-p"),
      seed: whole(this.seed, "Seed") + nth,
    };
    if (this.isText) return { ...body, ...(this.likely.checked && { logprobs: TOP }) };
    const tools = this.tools.value.trim() ? { tools: parsedTools(this.tools.value) } : {};
    return { ...body, ...tools, ...(this.likely.checked && { logprobs: true, top_logprobs: TOP }) };
  }

  /** The system prompt as a message, or nothing. */
  get opening() {
    return this.system.value.trim() ? [{ role: "system", content: this.system.value }] : [];
  }
}

/** Whether a model of `/v1/models` answers, and with text. */
export function writes({ state, task }) {
  return !["available", "failed"].includes(state) && (task ?? "generate") === "generate";
}

function numeric(id, properties) {
  return element("input", { id, type: "number", ...properties });
}

function real(field, name) {
  if (field.value.trim() === "" || Number.isNaN(Number(field.value))) throw new Error(`${name} needs a number.`);
  return Number(field.value);
}

function whole(field, name) {
  const value = real(field, name);
  if (!Number.isSafeInteger(value)) throw new Error(`${name} needs a whole number.`);
  return value;
}

function parsedTools(text) {
  let tools;
  try {
    tools = JSON.parse(text);
  } catch (error) {
    throw new Error(`The tools are not JSON: ${error.message}`);
  }
  if (!Array.isArray(tools)) throw new Error("The tools have to be a JSON list.");
  return tools;
}
