// Numbers of each head over the blocks.

import { $, make } from "./dom.js";
import { called, NUMBERS } from "./facts.js";

/** Labels at multiples of 1, 2 or 5 times a power of ten: all that a library for axes would save. */
function ticks(most) {
  const power = 10 ** Math.floor(Math.log10(most / 2));
  const step = [5, 2, 1].map((digit) => digit * power).find((size) => size <= most / 2);
  return Array.from({ length: Math.floor(most / step + 1e-6) + 1 }, (_, i) => {
    const label = make("span", { className: "at" }, Number((i * step).toPrecision(2)));
    label.style.bottom = `${(100 * i * step) / most}%`;
    return label;
  });
}

/** One chart: dots at shares of its width and height, each a button that chooses its head. */
function chart({ name, title, unit, meaning }, maps, value, idle) {
  const { layers, heads } = maps;
  const places = Array.from({ length: layers * heads }, (_, i) => [Math.floor(i / heads), i % heads]);
  const known = places.filter((place) => value(...place) !== null);
  if (!known.length) return [];
  const most = Math.max(...known.map((place) => value(...place)), 1e-9);
  const dots = known.map(([layer, head]) => {
    const text = `${called(maps, layer, head)}: ${value(layer, head).toFixed(3)}`;
    const data = { layer, head };
    const dot = make("button", { className: "dot", title: text, ariaLabel: text, tabIndex: -1, data });
    dot.classList.toggle("idle", idle(layer, head));
    dot.style.left = `${(100 * (layer + 0.15 + (0.7 * (head + 0.5)) / heads)) / layers}%`;
    dot.style.bottom = `${(100 * value(layer, head)) / most}%`;
    return dot;
  });
  const plot = make("div", { className: "plot", role: "group", ariaLabel: title }, ...ticks(most), ...dots);
  const caption = make("figcaption", {}, make("b", {}, title), ` ${unit}`);
  const blocks = make(
    "div",
    { className: "blocks" },
    make("span", {}, `block ${maps.block(0)}`),
    make("span", {}, maps.block(layers - 1)),
  );
  return [make("figure", { id: `chart-${name}` }, caption, plot, blocks, make("small", {}, meaning))];
}

export function renderCharts(maps) {
  const idle = (layer, head) => Boolean(maps.number("idle", layer, head));
  const drawn = NUMBERS.map((each) => chart(each, maps, (layer, head) => maps.number(each.name, layer, head), idle));
  $("charts").replaceChildren(...drawn.flat());
}
