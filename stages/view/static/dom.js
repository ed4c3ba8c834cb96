// Small things that every part of the page needs.

export const $ = (id) => document.getElementById(id);

export const percent = (share) => `${(100 * share).toFixed(share > 0.9995 ? 0 : 1)} %`;
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

/** The least and the largest weight. */
export function extremes(weights) {
  let least = Infinity;
  let most = 0;
  for (const weight of weights) {
    if (weight > most) most = weight;
    if (weight < least) least = weight;
  }
  return [least, most];
}
