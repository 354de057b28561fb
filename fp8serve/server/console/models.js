// Which weights serve, which could, and the change from one to another.

import { get } from "./api.js";
import { button, element, facts, renew, table } from "./dom.js";
import { announce, onModels } from "./state.js";
import { serve, wayBack } from "./swap.js";

export function modelsView(section) {
  const view = new Models();
  section.append(view.node);
  return view;
}

class Models {
  constructor() {
    this.now = element("div", { className: "card", id: "served" });
    this.available = element("div", { className: "card", id: "available" });
    this.names = element("div", { className: "card", id: "names" });
    this.info = element("details", { id: "info" }, element("summary", {}, "Facts, limits and options of this server"));
    this.about = element("div", { className: "sides" });
    this.info.append(this.about);
    this.node = element("div", {}, this.now, this.available, this.names, this.info);
    onModels((models) => this.showNames(models));
  }

  async refresh() {
    const found = await get("models");
    renew(this.now, found, () => this.served(found));
    renew(this.available, [found.available, found.served, found.activating !== null], () => this.choice(found));
    if (this.info.open) await this.showInfo();
  }

  served({ served, activating, available, state }) {
    const back = wayBack(served, available[0].model);
    const loading = activating && element("p", {}, `Loading ${activating.model} for ${Math.round(activating.seconds)} s. The present weights serve until it is ready.`);
    const rollBack = back && button(`Roll back to ${back.model}`, () => serve(back.source, back.model).then(() => this.refresh()), { disabled: Boolean(activating), report: announce, id: "roll-back" });
    if (!served) return [element("h3", {}, "Serving"), element("p", {}, `Nothing yet: ${state}.`), loading];
    return [element("h3", {}, "Serving"), facts([["Model", served.model], ["Weights", served.weight_version], ["From", served.source === "base" ? "the start of the server" : served.source]]), loading, rollBack].filter(Boolean);
  }

  choice({ available, served, activating }) {
    const rows = available.map(({ source, model }) => {
      const origin = source === "base" ? "base model" : element("a", { href: `#/finetune/${encodeURIComponent(source)}` }, "fine-tune job");
      const isServed = source === served?.source;
      const act = isServed ? element("b", { className: "good" }, "serving") : button("Serve", () => serve(source, model).then(() => this.refresh()), { disabled: Boolean(activating), report: announce, "aria-label": `Serve ${model}` });
      return [model, origin, act];
    });
    return [element("h3", {}, "Weights that can serve"), table("Weights that can serve", ["Model", "Origin", ""], rows, "stacked"), element("p", { className: "quiet" }, "Requests under way end with the weights that they began with.")];
  }

  showNames(models) {
    renew(this.names, models, () => {
      const rows = models.map((model) => [model.id, model.task ?? "–", model.max_model_len ?? "–", (model.task ?? "generate") === "generate" ? element("a", { href: `#/chat?model=${encodeURIComponent(model.id)}`, "aria-label": `Compare ${model.id} in the chat` }, "Compare in chat") : null]);
      return [element("h3", {}, "Names that requests may use"), table("Names that requests may use", ["Name", "Task", "Context, in tokens", ""], rows, "stacked")];
    });
  }

  async showInfo() {
    const info = await get("info");
    const flat = (object) => Object.entries(object).map(([name, value]) => [name, value !== null && typeof value === "object" ? JSON.stringify(value) : value]);
    const groups = [["The engine", info.engine], ["Limits", info.limits], ["Options", info.options]];
    renew(this.about, groups, () => groups.map(([name, object]) => element("div", { className: "card" }, element("h3", {}, name), facts(flat(object)))));
  }
}
