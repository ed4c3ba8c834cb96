// Small things that every part of the page needs.

export const $ = (id) => document.getElementById(id);

export const percent = (share) => `${(100 * share).toFixed(share > 0.9995 ? 0 : 1)} %`;
/** A weight, to three digits. */
export const short = (number) => (number ? number.toPrecision(3) : "0");
export const count = (number) => number.toLocaleString("en");

/** The end of a path or URL. */
export const ending = (path) => path.split("/").filter(Boolean).slice(-2).join("/");

/** An element with properties and children. What `data` sets, a click on it does to the state. */
export function make(tag, { data = {}, ...properties } = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  Object.assign(element.dataset, data);
  element.append(...children);
  return element;
}

/** The least weight, and the 98th percentile (stages/look/colours.py), from which on all is drawn as
 * bright as can be: one patch may have more than all others. Where that is 0, the largest weight. */
export function rangeOf(weights) {
  const sorted = weights.slice().sort();
  const place = 0.98 * (sorted.length - 1);
  const below = sorted[Math.floor(place)];
  const top = below + (place % 1) * (sorted[Math.ceil(place)] - below);
  return [sorted[0], top || sorted.at(-1)];
}
