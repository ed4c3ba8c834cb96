// Small things that every part of the page needs.

export const $ = (id) => document.getElementById(id);

export const percent = (share) => `${(100 * share).toFixed(share > 0.9995 ? 0 : 1)} %`;

/** The end of a path or URL. */
export const ending = (path) => path.split("/").filter(Boolean).slice(-2).join("/");

export function largest(weights) {
  let most = 0;
  for (const weight of weights) if (weight > most) most = weight;
  return most;
}
