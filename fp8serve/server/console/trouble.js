// How well the input of an FP8 layer fits its scale, as levels that a person should care about, and in words.

import { number, percent } from "./numbers.js";

export const SOME = 0.001,
  MANY = 0.01; // shares cut off: the largest values of some tokens always are

/** 0: all is well; 1: worth a look; 2: costs answers their quality. */
export function level(layer) {
  if (layer.saturation >= MANY) return 2;
  return layer.saturation >= SOME || layer.drifts ? 1 : 0;
}

/** The larger, the more trouble: first by level, then by how near to the end of the format the values are. */
export function trouble(layer) {
  return level(layer) * 1e6 + (layer.saturation ?? 0) * 1e5 + 1 / (layer.headroom ?? Infinity);
}

/** All layers in one calm sentence, or the worst of them by name. */
export function verdict(layers) {
  if (layers.length === 0) return "These weights run in high precision: there are no scales.";
  if (layers.every((layer) => layer.scale === null))
    return "These scales follow every input, so nothing is stored that traffic could leave.";
  const stored = layers.filter((layer) => layer.scale !== null);
  if (stored.every((layer) => layer.headroom === null))
    return `No input has been seen since the start: ${stored.length} scales wait for a first request.`;
  const troubled = stored.filter((layer) => level(layer) > 0).sort((a, b) => trouble(b) - trouble(a));
  if (troubled.length === 0) return `All is well: every one of ${stored.length} scales fits what it is given.`;
  return `${troubled.length} of ${stored.length} scales ${troubled.length === 1 ? "needs" : "need"} a look. ${sentence(troubled[0])}`;
}

/** What is wrong with one layer, or that nothing is. */
export function sentence(layer) {
  const cut = layer.saturation >= SOME ? `${layer.name} cuts off ${percent(layer.saturation)} of its input` : null;
  const drift = layer.drifts ? `its largest input was ${number(layer.drift)} times what calibration saw` : null;
  if (cut && drift) return `${cut}, and ${drift}.`;
  if (cut) return `${cut}.`;
  if (drift) return `${layer.name}: ${drift}.`;
  if (layer.scale === null) return `${layer.name}: its scale follows every input.`;
  if (layer.headroom === null) return `${layer.name}: no input was seen yet.`;
  return `${layer.name} fits: its largest input could be ${number(layer.headroom)} times as large before anything is cut off.`;
}
