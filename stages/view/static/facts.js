// What is shown, in words and numbers.

import { $, ending, make, percent, short } from "./dom.js";

/** Numbers of a head, as charts, cells and facts name them. */
export const NUMBERS = [
  { name: "entropy", title: "Entropy", unit: "nats", meaning: "Low: a head that reads few tokens." },
  {
    name: "distance",
    title: "Distance",
    unit: "tokens",
    meaning: "From a patch to where it reads. Low: a local head.",
  },
  {
    name: "share",
    title: "Largest key",
    unit: "",
    meaning: "Its share. High: most queries read one and the same token, a sink.",
  },
  {
    name: "value",
    title: "Its value",
    unit: "of the mean",
    meaning: "Low: reading that token adds little. A ring: the head does nothing.",
  },
  { name: "kl", title: "KL", unit: "nats", meaning: "High: the student's head differs from the teacher's." },
];

const MOVES = "what moves the features";

/** Whether the gradient is that of the features, for want of classes. */
const ofFeatures = ({ header }) => header.predicted === null;

/** What a map is called in a sentence. */
export const called = (maps, layer, head) => `Block ${maps.block(layer)}, ${/^\d/.test(head) ? `head ${head}` : head}`;

/** [title, number] of each number of a head that is known. */
export function numbersOf(maps, layer, head) {
  return NUMBERS.flatMap(({ name, title, unit }) => {
    const number = maps.number(name, layer, head);
    return number === null ? [] : [[title, `${number.toFixed(name === "kl" ? 3 : 2)} ${unit}`.trim()]];
  });
}

/** The image's name and class, and what the models take it for. */
export function renderHeading({ own, state, className }) {
  const { header } = own;
  const name = header.title ?? `Image ${state.image}`;
  $("title").textContent = header.label == null ? name : `${name}: ${className(header.label)}`;
  document.title = `${name} – attention maps`;
  const isSaid = header.label == null && header.explains; // by the first of the chips
  const predictions = [header.stored, header].filter((one) => one?.predicted != null && !isSaid);
  const parts = predictions.map(({ name, predicted, probability, label }) => {
    const said = `${ending(name)}: ${className(predicted)}, ${percent(probability)}`;
    if (label == null) return make("span", {}, said);
    if (predicted === label) return make("span", { className: "right" }, `✓ ${said}`);
    return make("span", { className: "wrong" }, `✗ ${said}`);
  });
  $("verdict").replaceChildren(...parts);
}

/** A sentence about a pane, for its caption and for those who cannot see it. */
export function sentence(app, pane) {
  const { state, compared, rival, className } = app;
  const { maps, name, weights, grid, query, there } = pane;
  if (!there) return `${name}: no stored map for this block.`;
  const { head, direction, layer } = state;
  const place = (token) =>
    typeof token === "number"
      ? `row ${Math.floor(token / grid[1])}, column ${token % grid[1]}`
      : `the ${maps.extra[maps.row(token)]} token`;
  const most = weights.reduce((best, weight, token) => (weight > weights[best] ? token : best), 0);
  const who = query === "mean" ? "the patches, on average," : place(query);
  let what = `${who} ${query === "mean" ? "read" : "reads"} here`;
  if (direction === "to") what = `these patches read ${who}`;
  if (head === "gradient") {
    const label = className(maps.explained?.class ?? maps.header.predicted);
    const moves = ofFeatures(maps) ? MOVES : `what speaks for “${label}”`;
    what = `${moves} in the blocks up to ${maps.block(layer)}, as ${who} ${query === "mean" ? "read" : "reads"} it`;
  }
  const whose = compared || rival ? `${headline(app, pane)}. ` : "";
  const [h, w] = grid;
  const few = 2 * (h + w) - 4 < (h * w) / 2; // in a small grid most patches are outermost
  const outermost = most % w === 0 || most % w === w - 1 || most < w || most >= (h - 1) * w;
  const warning = few && outermost ? " It reads the border: often a sink." : "";
  return `${whose}Bright: ${what}. Most: ${place(most)} (${weights[most].toPrecision(3)}).${warning}`;
}

/** What a pane shows, in a few words. */
export function headline({ state, compared, className }, { name, maps }) {
  const { header, explained } = maps;
  if (compared) return ending(name);
  if (header.predicted == null) return header.title ?? `Image ${state.image}`;
  const { class: label, probability } =
    state.head === "gradient" && explained ? explained : { class: header.predicted, probability: header.probability };
  return `${className(label)}, ${percent(probability)}`;
}

/** The likeliest classes as buttons: each explains its class, or shows it beside the one that is. */
export function renderChips({ own, compared, className }) {
  const { likely, probabilities } = own.header;
  const chips = likely.map((label, place) => {
    const name = className(label);
    const data = { head: "gradient", explain: place ? label : "top" };
    const share = probabilities[place] < 0.005 ? "< 1" : Math.round(100 * probabilities[place]);
    const said = `${name} ${share} %`;
    const title = `${name}, ${percent(probabilities[place])}`;
    const chip = make("span", { className: "chip" }, make("button", { data, title }, said));
    const beside = { data: { head: "gradient", beside: label }, title: `${name} beside`, ariaLabel: `${name} beside` };
    if (!compared) chip.append(make("button", { className: "plus", ...beside }, "+"));
    return chip;
  });
  $("chips").replaceChildren(...chips);
}

/** What became of a class or of the features without the brightest patches of a map. */
export function testedText({ label, whole, without, random }, { className }) {
  if (label === null) {
    const [one, other] = [without, random].map((cosine) => cosine.toFixed(2));
    return `features stay ${one} alike (cosine); without random patches ${other}`;
  }
  return `${className(label)}: ${percent(whole)} → ${percent(without)}; without random patches ${percent(random)}`;
}

/** What a picture says of the map that it shows. */
export function cardLines({ state, maps }, ranges) {
  const { layer, head, query, direction } = state;
  const who =
    query === "mean"
      ? "all patches"
      : typeof query === "number"
        ? "the marked patch"
        : `the ${maps.extra[maps.row(query)]} token`;
  const gradient = ofFeatures(maps) ? MOVES : "gradient rollout";
  const words = { mean: "mean over heads", rollout: "rollout", gradient };
  const what = `block ${maps.block(layer)}, ${words[head] ?? `head ${head}`}`;
  const reads = direction === "to" ? `who reads ${who}` : `what ${who} ${query === "mean" ? "read" : "reads"}`;
  const scales = ranges.map((range) => range.map(short).join(" to "));
  const scale = `weights ${scales.join(" and ")}, the 98th percentile`;
  return [`${ending(maps.header.name)} · ${what} · ${reads}`, `${scale} · gaupipe view`];
}

/** The numbers of what is shown for a query. */
export function renderFacts({ state, maps, own, className }, query) {
  const { layer, head, direction } = state;
  const [, w] = maps.grid;
  const moves = ofFeatures(own) ? MOVES : `relevance for ${className(own.explained?.class)}`;
  const words = {
    mean: "mean over heads",
    rollout: "rollout up to this block",
    gradient: `${moves}, up to this block`,
  };
  const facts = [["Map", `block ${maps.block(layer)}, ${words[head] ?? `head ${head}`}`]];
  if (typeof query === "number") {
    facts.push(["Patch", `${query} (row ${Math.floor(query / w)}, col ${query % w})`]);
  } else if (query === "mean") facts.push(["Patch", "mean over all"]);
  else facts.push(["Token", maps.extra[maps.row(query)]]);
  if (maps.extra.length && maps.has(layer)) {
    const whole = maps.whole(layer, head, query, direction);
    const lost = maps.extra.map((name, p) => `${name} ${whole[p].toFixed(3)}`);
    facts.push([direction === "from" ? "To" : "From", lost.join(", ")]);
  }
  facts.push(...numbersOf(maps, layer, head).filter(([title]) => title !== "KL"));
  const far = own.divergence(layer, head, query);
  if (far !== null) facts.push(["KL", `${far.toFixed(4)} nats`]);
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
