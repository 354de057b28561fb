// The reference page: the OpenAPI description as text, grouped by tag.
import { element } from "./dom.js";

function resolved(schema, all, seen = []) {
  if (Array.isArray(schema)) return schema.map((item) => resolved(item, all, seen));
  if (schema === null || typeof schema !== "object") return schema;
  if (schema.$ref) {
    const name = schema.$ref.split("/").at(-1);
    return seen.includes(name) ? { title: name } : resolved(all[name], all, [...seen, name]);
  }
  return Object.fromEntries(
    Object.entries(schema)
      .filter(([key]) => key !== "title")
      .map(([key, value]) => [key, resolved(value, all, seen)]),
  );
}

function route(path, method, operation, schemas) {
  const parts = [
    element("dt", {}, element("span", { className: "method" }, method.toUpperCase()), path),
    element("dd", {}, operation.summary ?? ""),
  ];
  if (operation.description) parts.push(element("dd", {}, operation.description));
  for (const [type, { schema }] of Object.entries(operation.requestBody?.content ?? {})) {
    const text = JSON.stringify(resolved(schema, schemas), null, 2);
    parts.push(
      element("dd", {}, element("details", {}, element("summary", {}, `Body (${type})`), element("pre", {}, text))),
    );
  }
  return parts;
}

(async function show() {
  const description = await (await fetch(new URL("../openapi.json", import.meta.url))).json();
  const groups = new Map();
  for (const [path, methods] of Object.entries(description.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const tag = operation.tags?.[0] ?? "other";
      if (!groups.has(tag)) groups.set(tag, element("dl", { className: "routes" }));
      groups.get(tag).append(...route(path, method, operation, description.components?.schemas ?? {}));
    }
  }
  for (const [tag, list] of groups)
    document.getElementById("groups").append(element("section", { className: "card" }, element("h2", {}, tag), list));
})();
