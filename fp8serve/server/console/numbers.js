// Numbers and times as text.

/** Four digits, or a power of ten for very large and small numbers; a dash for no number. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-3)) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

export const percent = (share) =>
  share === null || share === undefined ? "–" : `${Number((100 * share).toPrecision(3))} %`;
export const count = (value) => Math.round(value).toLocaleString("en");

export function bytes(size) {
  const unit = ["B", "kB", "MB", "GB"].findIndex((_, i) => size < 1000 ** (i + 1));
  const power = unit < 0 ? 3 : unit;
  return `${Number((size / 1000 ** power).toPrecision(3))} ${["B", "kB", "MB", "GB"][power]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value.toFixed(1)} s`;
  return value < 6000 ? `${Math.round(value / 60)} min` : `${(value / 3600).toFixed(1)} h`;
}

/** A time that a server gave in seconds since 1970. */
export const moment = (time) => (time ? new Date(time * 1000).toLocaleString("en-GB") : "–");
