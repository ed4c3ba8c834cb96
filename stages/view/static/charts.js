// Numbers of each head over the blocks.

import { $, called, make } from "./dom.js";

const CHARTS = [
  ["entropy", "Entropy", "nats", "Low: a head that reads few tokens."],
  ["distance", "Distance", "tokens", "From a patch to where it reads. Low: a local head."],
  ["share", "Largest key", "share", "High: most queries read one and the same token, a sink."],
  ["value", "Its value", "of the mean", "Low: reading that token adds little. A ring: the head does nothing."],
  ["kl", "KL", "nats", "High: the student's head differs from the teacher's."],
];

/** One chart: dots at shares of its width and height, each a button that chooses its head. */
function chart([name, title, unit, meaning], maps, state, value, choose) {
  const dots = [];
  for (let layer = 0; layer < maps.layers; layer++) {
    for (let head = 0; head < maps.heads; head++) {
      const number = value(layer, head);
      if (number !== null) dots.push({ layer, head, number });
    }
  }
  if (!dots.length) return [];
  const end = nice(Math.max(...dots.map((dot) => dot.number), 1e-9));
  const plot = make("div", { className: "plot", role: "group", ariaLabel: `${title}, ${unit}` });
  for (const share of [0, 0.5, 1]) {
    const text = String(Number((share * end).toPrecision(3)));
    const rule = make("span", { className: "rule" }, text);
    rule.style.bottom = `${100 * share}%`;
    plot.append(rule);
  }
  for (const { layer, head, number } of dots) {
    const text = `${called(layer, head)}: ${number.toFixed(3)}`;
    const dot = make("button", { className: "dot", title: text, ariaLabel: text, tabIndex: -1 });
    dot.ariaPressed = layer === state.layer && head === state.head;
    dot.classList.toggle("idle", Boolean(maps.number("idle", layer, head)));
    const within = (head - (maps.heads - 1) / 2) / maps.heads;
    dot.style.left = `${(100 * (layer + 0.5 + 0.7 * within)) / maps.layers}%`;
    dot.style.bottom = `${(100 * number) / end}%`;
    dot.addEventListener("click", () => choose(layer, head));
    plot.append(dot);
  }
  const caption = make("figcaption", {}, make("b", { textContent: title }), ` ${unit}`);
  const ticks = make("div", { className: "blocks" }, make("span", {}, "block 0"), make("span", {}, maps.layers - 1));
  return [make("figure", { id: `chart-${name}` }, caption, plot, ticks, make("small", {}, meaning))];
}

/** The next round number. */
function nice(number) {
  const power = 10 ** Math.floor(Math.log10(number));
  return [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].find((step) => step * power >= number * 0.999) * power;
}

export function renderCharts(maps, state, kl, choose) {
  const drawn = CHARTS.flatMap((each) => {
    const value = each[0] === "kl" ? kl : (layer, head) => maps.number(each[0], layer, head);
    return chart(each, maps, state, value, choose);
  });
  $("charts").replaceChildren(...drawn);
}
