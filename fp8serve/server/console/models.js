// The weights that serve, with their adapters, the weights that could serve, and the change between them.

import { get, send } from "./api.js";
import { button, element, facts, labelled, renew, table } from "./dom.js";
import { writes } from "./chat_settings.js";
import { bytes, count } from "./numbers.js";
import { announce, onModels } from "./state.js";
import { load, serve, unload, wayBack } from "./swap.js";

const KINDS = { lora: "LoRA", dora: "DoRA" };

export class Models {
  constructor() {
    this.now = element("div", { className: "card", id: "served" });
    this.adapters = new Adapters(() => this.refresh());
    this.available = element("div", { className: "card", id: "available" });
    this.names = element("div", { className: "card", id: "names" });
    this.info = element("details", { id: "info" }, element("summary", {}, "Facts, limits and options of this server"));
    this.about = element("div", { className: "sides" });
    this.info.append(this.about);
    this.node = element("div", {}, this.now, this.adapters.node, this.available, this.names, this.info);
    onModels((models) => this.showNames(models));
  }

  async refresh() {
    const listing = await get("models");
    const { available, loadable, models, activating } = listing;
    renew(this.now, listing, () => this.served(listing));
    this.adapters.show(models);
    renew(this.available, [available, loadable, models, activating !== null], () => this.choice(listing));
    if (this.info.open) await this.showInfo();
  }

  served({ served, activating, available, state, models }) {
    if (models?.length > 1) return this.several(models);
    const back = wayBack(served, available[0].model);
    const loading =
      activating &&
      element(
        "p",
        {},
        `Loading ${activating.model} for ${Math.round(activating.seconds)} s. The present weights serve until it is ready.`,
      );
    if (!served) return [element("h3", {}, "Serving"), element("p", {}, `Nothing yet: ${state}.`), loading];
    const origin = served.source === "base" ? "the start of the server" : served.source;
    const known = facts([
      ["Model", served.model],
      ["Weights", served.weight_version],
      ["From", origin],
    ]);
    const rollBack =
      back &&
      this.act(`Roll back to ${back.model}`, () => serve(back.source, back.model, back.base), {
        disabled: Boolean(activating),
        id: "roll-back",
      });
    return [element("h3", {}, "Serving"), known, loading, rollBack];
  }

  /** If the server has several models, lists each with its state. */
  several(models) {
    const rows = models.map(
      ({ name, default: isDefault, state, problem, served, in_flight: busy, memory_bytes: memory }) => [
        isDefault ? `${name} (default)` : name,
        problem ? `${state}: ${problem}` : state,
        served?.model === name ? served.weight_version : (served?.model ?? "–"),
        count(busy),
        bytes(Object.values(memory).reduce((sum, size) => sum + size, 0)),
        this.actions(name, isDefault, served),
      ],
    );
    return [
      element("h3", {}, "Serving"),
      table("Models that serve", ["Model", "State", "Weights", "In flight", "Memory", ""], rows, "stacked"),
    ];
  }

  actions(name, isDefault, served) {
    const back = served && served.source !== "base" && served.source.startsWith("ftjob-") && isDefault;
    return [
      back && this.act(`Roll back to ${name}`, () => serve("base", name, name)),
      !isDefault && this.act("Unload", () => unload(name), { "aria-label": `Unload ${name}` }),
    ].filter(Boolean);
  }

  act(name, work, properties = {}) {
    const key = properties["aria-label"] ?? name; // identifies the button when the list is drawn again
    const act = () => work().then(() => this.refresh());
    return button(name, act, { report: announce, "data-key": key, ...properties });
  }

  choice({ available, served, activating, models = [], loadable = [] }) {
    const off = { disabled: Boolean(activating) };
    const serving = new Set(
      [served?.source, ...models.map((model) => model.served?.source)].filter((source) => source !== "base"),
    );
    if (served?.source === "base") serving.add("base");
    const rows = available.map(({ source, model }) => {
      const origin =
        source === "base"
          ? "base model"
          : element("a", { href: `#/finetune/${encodeURIComponent(source)}` }, "fine-tune job");
      if (serving.has(source)) return [model, origin, element("b", { className: "good" }, "serving")];
      const beside =
        models.length > 0 &&
        source !== "base" &&
        this.act("Load beside", () => load(source, model), { "aria-label": `Load ${model} beside the others` });
      return [
        model,
        origin,
        [this.act("Serve", () => serve(source, model), { ...off, "aria-label": `Serve ${model}` }), beside].filter(
          Boolean,
        ),
      ];
    });
    const loaded = new Set(models.map(({ name }) => name));
    const folders = loadable
      .filter((name) => !loaded.has(name))
      .map((name) => [
        name,
        "directory",
        this.act("Load beside", () => load(name, name), { "aria-label": `Load ${name} beside the others` }),
      ]);
    return [
      element("h3", {}, "Weights that can serve"),
      table("Weights that can serve", ["Model", "Origin", ""], [...rows, ...folders], "stacked"),
      element("p", { className: "quiet" }, "Requests under way end with the weights that they began with."),
    ];
  }

  showNames(models) {
    const usable = models.filter(({ state }) => state !== "available");
    renew(this.names, usable, () => {
      const rows = usable.map((model) => [
        model.id,
        model.task ?? "–",
        model.max_model_len ?? "–",
        writes(model) ? compare(model.id) : null,
      ]);
      return [
        element("h3", {}, "Names that requests may use"),
        table("Names that requests may use", ["Name", "Task", "Context, in tokens", ""], rows, "stacked"),
      ];
    });
  }

  async showInfo() {
    const info = await get("info");
    const flat = (object) =>
      Object.entries(object).map(([name, value]) => [
        name,
        value !== null && typeof value === "object" ? JSON.stringify(value) : value,
      ]);
    const groups = [
      ["The engine", info.engine],
      ["Limits", info.limits],
      ["Options", info.options],
    ];
    renew(this.about, groups, () =>
      groups.map(([name, object]) =>
        element("div", { className: "card" }, element("h3", {}, name), facts(flat(object))),
      ),
    );
  }
}

function compare(name) {
  return element(
    "a",
    { href: `#/chat?model=${encodeURIComponent(name)}`, "aria-label": `Compare ${name} in the chat` },
    "Compare in chat",
  );
}

/** The adapters beside the models that serve, a form that loads another, and a button that unloads each. */
class Adapters {
  /** `changed`: called when an adapter was loaded or unloaded; a promise. */
  constructor(changed) {
    this.changed = changed;
    this.list = element("div");
    this.name = text("adapter-name");
    this.path = text("adapter-path");
    this.path.setAttribute("aria-describedby", "adapter-note");
    this.base = element("select", { id: "adapter-base" });
    this.baseField = labelled("Beside", this.base);
    this.load = element("button", { id: "load-adapter" }, "Load adapter");
    this.form = element(
      "form",
      { "aria-label": "Load an adapter", onsubmit: (event) => this.submit(event) },
      element(
        "div",
        { className: "row" },
        labelled("Name", this.name),
        labelled("Directory or job", this.path),
        this.baseField,
        this.load,
      ),
      element(
        "p",
        { className: "quiet", id: "adapter-note" },
        "A directory of --models-dir that holds an adapter, by its name there, or the id of a fine-tune job that " +
          "trained one. Requests choose the adapter by its name.",
      ),
    );
    const heading = element("h3", {}, "Adapters");
    this.node = element("div", { className: "card", id: "adapters" }, heading, this.list, this.form);
  }

  /** `models`: those of `GET /models`. Nothing is shown where no model could have an adapter. */
  show(models) {
    const bases = models.filter(writes).map(({ name }) => name);
    const rows = models.flatMap(({ name: base, adapters }) => adapters.map((adapter) => ({ base, ...adapter })));
    this.node.hidden = bases.length + rows.length === 0;
    const chosen = this.base.value;
    renew(this.base, bases, () => bases.map((name) => element("option", { selected: name === chosen }, name)));
    this.baseField.hidden = bases.length < 2;
    renew(this.list, rows, () => [
      rows.length === 0
        ? element("p", { className: "quiet" }, "None is loaded.")
        : table(
            "Adapters that serve",
            ["Adapter", "Beside", "Kind", "Rank", "From", "In flight", "Memory", ""],
            rows.map((adapter) => this.row(adapter)),
            "stacked",
          ),
    ]);
  }

  /** While the model of an adapter is loading, only the names are known. */
  row({ name, base, method, rank, root, in_flight: busy, bytes: memory }) {
    const kind = KINDS[method] ?? method ?? "–";
    const size = memory === null ? "–" : bytes(memory);
    const unload = button("Unload", () => this.unload(name), {
      report: announce,
      "aria-label": `Unload the adapter ${name}`,
      "data-key": name,
    });
    return [name, base, kind, rank ?? "–", root, count(busy), size, unload];
  }

  async submit(event) {
    event.preventDefault();
    const [name, path, base] = [this.name.value.trim(), this.path.value.trim(), this.base.value];
    this.load.disabled = true;
    announce(`Loading the adapter ${name}. What serves already goes on.`);
    try {
      await send("v1/load_lora_adapter", { lora_name: name, lora_path: path, base_model_name: base || null });
      this.name.value = this.path.value = "";
      announce(`The adapter ${name} serves now.`);
      await this.changed();
    } catch (error) {
      announce(error.message, true);
    } finally {
      this.load.disabled = false;
    }
  }

  async unload(name) {
    await send("v1/unload_lora_adapter", { lora_name: name });
    announce(`The adapter ${name} is no longer served.`);
    await this.changed();
  }
}

function text(id) {
  return element("input", { id, type: "text", required: true, autocomplete: "off", spellcheck: false });
}
