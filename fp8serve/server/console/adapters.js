// The adapters beside the models that serve, a form that loads another, and a button that unloads each.

import { send } from "./api.js";
import { labelled, writes } from "./chat_settings.js";
import { button, element, renew, table } from "./dom.js";
import { bytes, count } from "./numbers.js";
import { announce } from "./state.js";

const KINDS = { lora: "LoRA", dora: "DoRA" };

export class Adapters {
  /** `changed`: called when an adapter was loaded or unloaded; a promise. */
  constructor(changed) {
    this.changed = changed;
    this.list = element("div");
    this.name = text("adapter-name");
    this.path = text("adapter-path");
    this.path.setAttribute("aria-describedby", "adapter-note");
    this.base = element("select", { id: "adapter-base" });
    this.beside = labelled("Beside", this.base);
    this.load = element("button", { id: "load-adapter" }, "Load adapter");
    this.form = element(
      "form",
      { "aria-label": "Load an adapter", onsubmit: (event) => this.submit(event) },
      element(
        "div",
        { className: "row" },
        labelled("Name", this.name),
        labelled("Directory or job", this.path),
        this.beside,
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
    this.beside.hidden = bases.length < 2;
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

  /** Of an adapter whose model is still loading only the names are known. */
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
