// Changing the weights that serve, for all views, and going back to the previous weights.

import { get, post } from "./api.js";
import { announce } from "./state.js";

let previous = null; // the weights that served before the last change by this page
let swapping = false;

/**
 * Serves `source`: a job's id, or "base" for what the model `base` began with. Resolves when it serves; rejects with
 * the server's sentence.
 */
export async function serve(source, name, base) {
  if (swapping) throw new Error("Another change of weights is under way; wait until it has ended.");
  swapping = true;
  const since = performance.now();
  const tell = () =>
    announce(
      `Loading ${name}: ${Math.round((performance.now() - since) / 1000)} s. The present weights serve until it is ready.`,
    );
  tell();
  const ticking = setInterval(tell, 1000);
  try {
    const { model, served, previous: before } = await post(await route(source, base), body(source));
    previous = before && { ...before, base: model };
    announce(`Now serving ${served.model}.`);
  } catch (error) {
    announce(error.message, true);
    throw error;
  } finally {
    clearInterval(ticking);
    swapping = false;
  }
}

/** The previous weights may serve again, even if the present weights are much better. */
function body(source) {
  const named = isJob(source) ? {} : { source };
  return source === previous?.source ? { ...named, max_perplexity_ratio: 1e9 } : named;
}

/** Whether `source` is a job itself, and not "base" or a step of a job. */
function isJob(source) {
  return source !== "base" && !source.includes(":ckpt-step-");
}

async function route(source, base) {
  if (isJob(source)) return `finetune/${encodeURIComponent(source)}/activate`; // in place of the model it began with
  return `models/${encodeURIComponent(base ?? (await get("models")).alias)}/activate`;
}

/**
 * Serves the result of a job, a checkpoint of it, or a directory that the server knows, beside what serves already.
 * `shown`: what it is called on this page.
 */
export async function load(source, shown) {
  // "ft:..." always means the weights themselves, so a result is loaded under another name
  const [job, step] = source.split(":ckpt-step-");
  const name = job.startsWith("ftjob-") ? `tuned-${job.slice(-8)}${step ? `-step-${step}` : ""}` : source;
  announce(`Loading ${shown}. What serves already goes on.`);
  try {
    await post(`models/${encodeURIComponent(name)}/load`, { source });
    announce(`${shown} serves now beside the others, and is called ${name}.`);
  } catch (error) {
    announce(error.message, true);
    throw error;
  }
}

/** Unloads a model. */
export async function unload(name) {
  await post(`models/${encodeURIComponent(name)}/unload`);
  announce(`${name} is no longer served.`);
}

/** The weights before `served`: {source, model}, or null if there are none. `base`: the base model's name. */
export function wayBack(served, base) {
  if (previous && previous.source !== served?.source) return previous;
  return served && served.source !== "base" ? { source: "base", model: base } : null;
}
