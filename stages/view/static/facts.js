// What is shown, in words and numbers.

import { $, ending, percent } from "./dom.js";
import { divergence } from "./rows.js";

/** The image's class, and what teacher and student take it for. */
export function renderHeading(app, className) {
  const { stored, own, state } = app;
  const { header } = stored;
  const known = header.label == null ? "" : `: ${className(header.label)}`;
  $("title").textContent = header.title ?? `Image ${state.image}${known}`;
  document.title = `${header.title ?? `Image ${state.image}`} – attention maps`;
  const predictions = [header, ...(own ? [own.header] : [])].filter((one) => one.predicted != null);
  const parts = predictions.map(({ name, predicted, probability, label }) => {
    const part = document.createElement("span");
    if (label == null) {
      part.textContent = `${ending(name)}: ${className(predicted)}, ${percent(probability)}`;
      return part;
    }
    part.className = predicted === label ? "right" : "wrong";
    const mark = predicted === label ? "✓" : "✗";
    part.textContent = `${mark} ${name}: ${className(predicted)}, ${percent(probability)}`;
    return part;
  });
  $("verdict").replaceChildren(...parts);
}

/** The numbers of what is shown for a query. */
export function renderFacts(app, query, className) {
  const { state, maps, own, compared, stored } = app;
  const { layer, head } = state;
  const [, w] = maps.grid;
  const words = {
    mean: "mean over heads",
    rollout: "rollout up to this block",
    gradient: `relevance for ${className(maps.relevance?.header.class)}, up to this block`,
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
  if (typeof head === "number" && maps.has(layer)) {
    facts.push(["Entropy", `${maps.entropy(layer, head).toFixed(2)} nats`]);
    facts.push(["Distance", `${maps.distance(layer, head).toFixed(2)} tokens`]);
  }
  if (compared) {
    const far = divergence(own, compared, layer, head, query);
    if (far !== null) facts.push(["KL", `${far.toFixed(4)} nats`]);
  }
  const number = (value) => value.toFixed(3);
  const gaussian = own ? null : stored.gaussian(layer, head, query);
  if (gaussian) {
    const [meanX, meanY, stdX, stdY] = gaussian.map(number);
    facts.push(["Gaussian", `mean (${meanX}, ${meanY}), std (${stdX}, ${stdY})`]);
  }
  $("facts").replaceChildren(
    ...facts.map(([name, text]) => {
      const pair = document.createElement("div");
      pair.className = text.length > 38 ? "full" : text.length > 24 ? "wide" : "";
      const term = Object.assign(document.createElement("dt"), { textContent: name });
      pair.append(term, Object.assign(document.createElement("dd"), { textContent: text }));
      return pair;
    }),
  );
}
