// Prometheus text as numbers: samples by name, summed over labels, and quantiles of histograms.

/** [{name, labels: {}, value}] */
export function parsed(text) {
  return text
    .split("\n")
    .filter((line) => line && !line.startsWith("#"))
    .map((line) => {
      const [, name, labels, value] = line.match(/^([a-zA-Z_:][\w:]*)(\{.*\})? ([^ ]+)/) ?? [];
      return { name, labels: labelsOf(labels ?? ""), value: Number(value) };
    })
    .filter((sample) => sample.name && !Number.isNaN(sample.value));
}

function labelsOf(text) {
  const found = text.matchAll(/([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g);
  return Object.fromEntries(
    [...found].map(([, name, value]) => [name, value.replace(/\\(.)/g, (_, c) => (c === "n" ? "\n" : c))]),
  );
}

export class Samples {
  constructor(text) {
    this.all = parsed(text);
  }

  /** The sum over all labels; null where there is no such series. */
  sum(name) {
    const found = this.all.filter((sample) => sample.name === name);
    return found.length ? found.reduce((total, { value }) => total + value, 0) : null;
  }

  /** [[label, value]] of one label, in falling order. */
  by(name, label) {
    const found = new Map();
    for (const { name: own, labels, value } of this.all)
      if (own === name && label in labels) found.set(labels[label], (found.get(labels[label]) ?? 0) + value);
    return [...found].sort((a, b) => b[1] - a[1]);
  }

  /** A quantile of a histogram, interpolated within its bucket; null when nothing was observed. */
  quantile(name, q) {
    const buckets = this.by(`${name}_bucket`, "le")
      .map(([le, n]) => [le === "+Inf" ? Infinity : Number(le), n])
      .sort((a, b) => a[0] - b[0]);
    const total = buckets.at(-1)?.[1];
    if (!total) return null;
    const wanted = q * total,
      i = buckets.findIndex(([, n]) => n >= wanted);
    const [low, before] = i ? buckets[i - 1] : [0, 0],
      [high, n] = buckets[i];
    return high === Infinity ? low : low + ((high - low) * (wanted - before)) / (n - before || 1);
  }
}
