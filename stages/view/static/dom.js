// Small things that every part of the page needs.

export const $ = (id) => document.getElementById(id);

export const percent = (share) => `${(100 * share).toFixed(share > 0.9995 ? 0 : 1)} %`;

/** The end of a path or URL. */
export const ending = (path) => path.split("/").filter(Boolean).slice(-2).join("/");

/** An element with properties and children. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
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

/** What a map is called in a sentence. */
export const called = (layer, head) => `block ${layer}, ${typeof head === "number" ? `head ${head}` : head}`;
