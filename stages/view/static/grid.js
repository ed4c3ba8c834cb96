// The bird's-eye view: maps of all blocks and heads, their mean and the rollout.

import { $, called, extremes, make } from "./dom.js";
import { paint } from "./draw.js";

export class Grid {
  constructor(app) {
    this.app = app;
    this.element = $("grid");
    this.cells = new Map();
    this.element.addEventListener("keydown", (event) => this.move(event));
  }

  /** Makes a button for each block and head of maps. */
  build(maps) {
    const { layers, columns } = maps;
    const shape = `${layers}/${columns}/${maps.grid}`;
    if (shape === this.shape) return;
    this.shape = shape;
    this.cells.clear();
    document.documentElement.style.setProperty("--columns", columns.length);
    this.element.style.setProperty("--layers", layers);
    this.element.style.setProperty("--aspect", maps.grid[1] / maps.grid[0]);
    this.element.classList.toggle("many", columns.length > 10);
    const kind = (text) => (typeof text === "string" ? "label word" : "label");
    const label = (text) => make("span", { className: kind(text) }, text);
    const parts = [label(""), ...columns.map(label)];
    for (let layer = 0; layer < layers; layer++) {
      parts.push(label(layer), ...columns.map((head) => this.cell(layer, head)));
    }
    this.element.replaceChildren(...parts);
  }

  cell(layer, head) {
    const button = make("button", { className: "cell" }, document.createElement("canvas"));
    Object.assign(button.dataset, { layer, head });
    button.addEventListener("click", () => this.app.set({ layer, head }));
    this.cells.set(button, { layer, head });
    return button;
  }

  /** Paints every map for a query, and marks the chosen one. */
  render(maps, query) {
    const { layer: chosenLayer, head: chosenHead, direction, scale, floor } = this.app.state;
    const shown = new Map();
    let least = Infinity;
    let most = 0;
    for (const [button, { layer, head }] of this.cells) {
      if (!maps.has(layer)) continue;
      const weights = maps.weights(layer, head, query, direction);
      const range = extremes(weights);
      shown.set(button, { weights, range });
      if (typeof head !== "number") continue;
      least = Math.min(least, range[0]);
      most = Math.max(most, range[1]);
    }
    for (const [button, { layer, head }] of this.cells) {
      const chosen = layer === chosenLayer && head === chosenHead;
      button.setAttribute("aria-pressed", chosen);
      button.tabIndex = chosen ? 0 : -1;
      button.disabled = !shown.has(button);
      if (button.disabled) continue;
      button.firstChild.hidden = !maps.map(layer, head); // until it has been computed
      const { weights, range } = shown.get(button);
      const [low, top] = scale === "one" && typeof head === "number" ? [least, most] : range;
      paint(button.firstChild, weights, maps.grid, [floor === "least" ? low : 0, top]);
    }
  }

  /** Says each head's numbers, which the charts draw. */
  describe(maps, kl) {
    for (const [button, { layer, head }] of this.cells) {
      const said = NUMBERS.flatMap(([name, term, unit]) => {
        const number = maps.number(name, layer, head);
        return number === null ? [] : [`${term} ${number.toFixed(2)}${unit}`];
      });
      const idle = Boolean(maps.number("idle", layer, head));
      if (idle) said.push("does nothing");
      const far = kl(layer, head);
      if (far !== null) said.push(`KL ${far.toFixed(3)}`);
      const name = called(layer, head).replace("block", "Block");
      button.classList.toggle("idle", idle);
      button.setAttribute("aria-label", said.length ? `${name}: ${said.join(", ")}` : name);
      button.title = [name, ...said].join("\n");
    }
  }

  move(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const at = this.cells.get(event.target.closest(".cell"));
    if (!at || !(event.key in steps)) return;
    event.preventDefault();
    event.stopPropagation();
    const { columns } = this.app.maps;
    const [down, right] = steps[event.key];
    const layer = at.layer + down;
    const head = columns[columns.indexOf(at.head) + right];
    const next = this.element.querySelector(`[data-layer="${layer}"][data-head="${head}"]`);
    if (!next || next.disabled) return;
    this.app.set({ layer, head });
    next.focus();
  }
}

export const NUMBERS = [
  ["entropy", "entropy", " nats"],
  ["distance", "mean distance", " tokens"],
  ["share", "largest key", ""],
  ["value", "its value", ""],
];
