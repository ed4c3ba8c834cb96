// What is shown, in words and numbers.

import { $, ending, make, percent } from "./dom.js";
import { NUMBERS } from "./grid.js";
import { divergence } from "./maps.js";

/** The image's name and class, and what the models take it for. */
export function renderHeading(app, className) {
  const { header } = app.own;
  const name = header.title ?? `Image ${app.state.image}`;
  $("title").textContent = header.label == null ? name : `${name}: ${className(header.label)}`;
  document.title = `${name} – attention maps`;
  const predictions = [header.stored, header].filter((one) => one?.predicted != null);
  const parts = predictions.map(({ name, predicted, probability, label }) => {
    const right = predicted === label;
    const mark = label == null ? "" : right ? "✓ " : "✗ ";
    const className_ = label == null ? "" : right ? "right" : "wrong";
    const said = `${mark}${ending(name)}: ${className(predicted)}, ${percent(probability)}`;
    return make("span", { className: className_ }, said);
  });
  $("verdict").replaceChildren(...parts);
}

/** A sentence about a pane, for its caption and for those who cannot see it. */
export function sentence(app, { name, weights, grid, query, there }, className) {
  if (!there) return `${name}: no stored map for this block.`;
  const { head, direction, layer } = app.state;
  const { maps } = app;
  const whose = app.compared ? `${name}. ` : "";
  const place = (token) =>
    typeof token === "number"
      ? `row ${Math.floor(token / grid[1])}, column ${token % grid[1]}`
      : `the ${maps.extra[maps.row(token)]} token`;
  let most = 0;
  weights.forEach((weight, token) => {
    if (weight > weights[most]) most = token;
  });
  const end = `Most: ${place(most)} (${weights[most].toPrecision(3)}).`;
  const who = query === "mean" ? "the patches, on average," : place(query);
  if (head === "gradient") {
    const what = className(maps.relevanceClass ?? maps.header.predicted);
    return `${whose}Bright: what speaks for “${what}” in the blocks up to ${layer}, as ${who} reads it. ${end}`;
  }
  if (direction === "to") return `${whose}Bright: these patches read ${who}. ${end}`;
  return `${whose}Bright: ${who} ${query === "mean" ? "read" : "reads"} here. ${end}`;
}

/** The numbers of what is shown for a query. */
export function renderFacts(app, query, className) {
  const { state, maps, own, compared } = app;
  const { layer, head } = state;
  const [, w] = maps.grid;
  const words = {
    mean: "mean over heads",
    rollout: "rollout up to this block",
    gradient: `relevance for ${className(own.relevanceClass)}, up to this block`,
  };
  const facts = [["Map", `block ${layer}, ${words[head] ?? `head ${head}`}`]];
  if (typeof query === "number") {
    facts.push(["Patch", `${query} (row ${Math.floor(query / w)}, col ${query % w})`]);
  } else if (query === "mean") facts.push(["Patch", "mean over all"]);
  else facts.push(["Token", maps.extra[maps.row(query)]]);
  if (maps.extra.length && maps.has(layer)) {
    const whole = maps.whole(layer, head, query, state.direction);
    const lost = maps.extra.map((name, p) => `${name} ${whole[p].toFixed(3)}`);
    facts.push([state.direction === "from" ? "To" : "From", lost.join(", ")]);
  }
  for (const [name, term, unit] of NUMBERS) {
    const number = maps.number(name, layer, head);
    if (number !== null) facts.push([term[0].toUpperCase() + term.slice(1), `${number.toFixed(2)}${unit}`]);
  }
  const far = compared && divergence(own, compared, layer, head, query);
  if (far != null) facts.push(["KL", `${far.toFixed(4)} nats`]);
  const gaussian = maps.gaussian(layer, head, query);
  if (gaussian) {
    const [meanX, meanY, stdX, stdY] = gaussian.map((value) => value.toFixed(3));
    facts.push(["Gaussian", `mean (${meanX}, ${meanY}), std (${stdX}, ${stdY})`]);
  }
  $("facts").replaceChildren(
    ...facts.map(([name, text]) => {
      const className = text.length > 38 ? "full" : text.length > 20 ? "wide" : "";
      return make("div", { className }, make("dt", {}, name), make("dd", {}, text));
    }),
  );
}
