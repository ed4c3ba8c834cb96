// Numbers of each head over the blocks: entropy, mean distance, and a student's divergence.

import { $ } from "./dom.js";

const SPACE = "http://www.w3.org/2000/svg";
const WIDTH = 136; // the least that the page gives a chart, so that no text becomes smaller
const HEIGHT = 130;
const BORDER = { left: 30, right: 14, top: 10, bottom: 34 };

function shape(name, attributes, text) {
  const element = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

/** One chart: `value` gives a head's number, or null. `choose` is called with a dot's head. */
function chart({ name, unit, value, top }, maps, state, choose) {
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  caption.append(Object.assign(document.createElement("b"), { textContent: name }), ` ${unit}`);
  const dots = [];
  for (let layer = 0; layer < maps.layers; layer++) {
    for (let head = 0; head < maps.heads; head++) {
      const number = value(layer, head);
      if (number !== null) dots.push({ layer, head, number });
    }
  }
  const most = Math.max(...dots.map((dot) => dot.number), 1e-9);
  const end = nice(top ? Math.min(top, most) : most);
  const across = (layer) =>
    BORDER.left +
    ((layer + 0.5) / maps.layers) * (WIDTH - BORDER.left - BORDER.right);
  const up = (number) =>
    HEIGHT - BORDER.bottom - (number / end) * (HEIGHT - BORDER.top - BORDER.bottom);
  const chosen = dots.find((dot) => dot.layer === state.layer && dot.head === state.head);
  const told = chosen ? `; block ${chosen.layer}, head ${chosen.head}: ${chosen.number.toFixed(2)}` : "";
  const range = dots.map((dot) => dot.number);
  const svg = shape("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
    role: "img",
    "aria-label":
      `${name} of each head, ${unit}: ${Math.min(...range).toFixed(2)} to ` +
      `${Math.max(...range).toFixed(2)}${told}`,
  });
  for (const share of [0, 0.5, 1]) {
    const y = up(share * end);
    svg.append(shape("line", { x1: BORDER.left, x2: WIDTH - BORDER.right, y1: y, y2: y, class: "rule" }));
    const text = String(Number((share * end).toPrecision(3)));
    svg.append(shape("text", { x: BORDER.left - 5, y: y + 3.5, class: "tick", "text-anchor": "end" }, text));
  }
  const every = Math.ceil(maps.layers / 8);
  for (let layer = 0; layer < maps.layers; layer += every) {
    const at = { x: across(layer), y: HEIGHT - 19, class: "tick", "text-anchor": "middle" };
    svg.append(shape("text", at, layer));
  }
  const middle = (BORDER.left + WIDTH - BORDER.right) / 2;
  const axis = { x: middle, y: HEIGHT - 5, class: "tick", "text-anchor": "middle" };
  svg.append(shape("text", axis, "block (a dot: a head)"));
  const spread = Math.min(3.5, (WIDTH - 50) / maps.layers / maps.heads / 1.6);
  for (const dot of dots) {
    const isChosen = dot === chosen;
    const circle = shape("circle", {
      cx: across(dot.layer) + (dot.head - (maps.heads - 1) / 2) * spread,
      cy: up(dot.number),
      r: isChosen ? 5 : 3.2,
      class: isChosen ? "dot chosen" : "dot",
    });
    circle.append(shape("title", {}, `block ${dot.layer}, head ${dot.head}: ${dot.number.toFixed(3)}`));
    circle.addEventListener("click", () => choose(dot.layer, dot.head));
    svg.append(circle);
  }
  if (chosen) {
    svg.append(svg.querySelector(".chosen")); // on top of the others
    const at = { x: Number(svg.lastChild.getAttribute("cx")) + 8, y: up(chosen.number) + 4 };
    svg.append(shape("text", { ...at, class: "tick named" }, chosen.head));
  }
  figure.append(caption, svg);
  return figure;
}

/** The next round number. */
function nice(number) {
  const power = 10 ** Math.floor(Math.log10(number));
  return [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((step) => step * power >= number * 0.999) * power;
}

export function renderCharts(maps, state, kl, choose) {
  const known = (measure) => (layer, head) => (maps.has(layer) ? measure(layer, head) : null);
  const charts = [
    { name: "Entropy", unit: "nats", value: known((layer, head) => maps.entropy(layer, head)) },
    { name: "Distance", unit: "tokens", value: known((layer, head) => maps.distance(layer, head)) },
  ];
  if (kl) charts.push({ name: "KL", unit: "nats", value: kl });
  const drawn = charts.map((each) => chart(each, maps, state, choose));
  $("charts").replaceChildren(...drawn);
}
