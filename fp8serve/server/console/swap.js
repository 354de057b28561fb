// The change of the weights that serve, from wherever it is asked for, and the way back.

import { get, post } from "./api.js";
import { announce } from "./state.js";

let previous = null; // what served before the last change that this page made
let swapping = false;

/** Serves `source` ("base" or a job's id). Resolves when it serves; rejects with the server's sentence. */
export async function serve(source, name) {
  if (swapping) throw new Error("Another change of weights is under way; wait until it has ended.");
  swapping = true;
  const since = performance.now();
  const tell = () => announce(`Loading ${name}: ${Math.round((performance.now() - since) / 1000)} s. The present weights serve until it is ready.`);
  tell();
  const ticking = setInterval(tell, 1000);
  try {
    const { alias } = await get("models");
    const { served, previous: before } = await post(`models/${encodeURIComponent(alias)}/activate`, { source });
    previous = before;
    announce(`Now serving ${served.model}.`);
  } catch (error) {
    announce(error.message, true);
    throw error;
  } finally {
    clearInterval(ticking);
    swapping = false;
  }
}

/** What to go back to from `served`: {source, model}, or null where there is nothing. `base`: the name of the base model. */
export function wayBack(served, base) {
  if (previous && previous.source !== served?.source) return previous;
  return served && served.source !== "base" ? { source: "base", model: base } : null;
}
