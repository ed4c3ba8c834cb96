// The bird's-eye view: maps of all blocks and heads, their mean and the rollout.

import { $, make, rangeOf } from "./dom.js";
import { paint, shares } from "./draw.js";
import { called, numbersOf } from "./facts.js";
import { capped } from "./maps.js";

export class Grid {
  constructor(app) {
    this.app = app;
    $("grid").addEventListener("keydown", (event) => this.move(event));
  }

  /** Makes a button for each block and head of maps. */
  build(maps) {
    const { layers, columns, grid } = maps;
    const shape = `${maps.header.blocks}/${columns}/${grid}`;
    if (shape === this.shape) return;
    this.shape = shape;
    document.documentElement.style.setProperty("--columns", columns.length);
    $("grid").style.setProperty("--layers", layers);
    $("grid").style.setProperty("--aspect", grid[1] / grid[0]);
    $("grid").classList.toggle("many", columns.length > 10);
    const label = (text) => make("span", { className: typeof text === "string" ? "label word" : "label" }, text);
    const cell = (layer, head) => make("button", { className: "cell", data: { layer, head } }, make("canvas"));
    const parts = [label(""), ...columns.map(label)];
    for (let layer = 0; layer < layers; layer++) {
      parts.push(label(maps.block(layer)), ...columns.map((head) => cell(layer, head)));
    }
    $("grid").replaceChildren(...parts);
    this.cells = parts.filter((part) => part.className === "cell");
  }

  /** Paints every map for a query. */
  render(maps, query) {
    const { direction, scale, floor, capped: even } = this.app.state;
    const shown = this.cells.map((cell, place) => {
      const layer = Math.floor(place / maps.columns.length);
      const head = maps.columns[place % maps.columns.length];
      cell.disabled = !maps.has(layer);
      cell.firstChild.hidden = !maps.map(layer, head); // until it has been computed
      const read = maps.weights(layer, head, query, direction);
      const weights = even ? capped(read, maps.grid) : read;
      return { cell, head, weights, range: rangeOf(weights) };
    });
    const heads = shown.filter(({ cell, head }) => !cell.disabled && typeof head === "number");
    const least = Math.min(...heads.map(({ range }) => range[0]));
    const most = Math.max(...heads.map(({ range }) => range[1]));
    for (const { cell, head, weights, range } of shown) {
      const [low, top] = scale && typeof head === "number" ? [least, most] : range;
      paint(cell.firstChild, shares(weights, [floor ? low : 0, top]), maps.grid);
    }
  }

  /** Says each head's numbers, which the charts draw. */
  describe(maps) {
    for (const cell of this.cells) {
      const { layer, head } = cell.dataset;
      const said = numbersOf(maps, layer, head).map((pair) => pair.join(" "));
      const idle = Boolean(maps.number("idle", layer, head));
      if (idle) said.push("does nothing");
      const name = called(maps, layer, head);
      cell.classList.toggle("idle", idle);
      cell.ariaLabel = said.length ? `${name}: ${said.join(", ")}` : name;
      cell.title = [name, ...said].join("\n");
    }
  }

  move(event) {
    const { columns } = this.app.maps;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns.length, ArrowDown: columns.length };
    if (!(event.key in steps)) return;
    event.preventDefault();
    event.stopPropagation();
    const next = this.cells[this.cells.indexOf(event.target) + steps[event.key]];
    if (!next || next.disabled) return;
    next.click();
    next.focus();
  }
}
