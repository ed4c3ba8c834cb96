// The bird's-eye view: maps of all blocks and heads, their mean and the rollout.

import { $, largest } from "./dom.js";
import { paint } from "./draw.js";

export class Grid {
  constructor(app) {
    this.app = app;
    this.element = $("grid");
    this.cells = new Map();
    this.element.addEventListener("keydown", (event) => this.move(event));
  }

  columns(maps) {
    return columnsOf(maps);
  }

  /** Makes a button for each block and head of maps. */
  build(maps) {
    const shape = `${maps.layers}/${this.columns(maps)}/${maps.grid}`;
    if (shape === this.shape) return;
    this.shape = shape;
    this.cells.clear();
    const columns = this.columns(maps);
    document.documentElement.style.setProperty("--columns", columns.length);
    this.element.style.setProperty("--layers", maps.layers);
    this.element.style.setProperty("--aspect", maps.grid[1] / maps.grid[0]);
    this.element.classList.toggle("many", columns.length > 10);
    const parts = [label("", "corner", "")];
    for (const head of columns) {
      const short = SHORT[head] ?? head;
      parts.push(label(typeof head === "number" ? `head ${head}` : head, "column", short));
    }
    for (let layer = 0; layer < maps.layers; layer++) {
      parts.push(label(`block ${layer}`, "row", layer));
      for (const head of columns) parts.push(this.cell(layer, head));
    }
    this.element.replaceChildren(...parts);
  }

  cell(layer, head) {
    const button = document.createElement("button");
    button.className = "cell";
    button.dataset.layer = layer;
    button.dataset.head = head;
    button.append(document.createElement("canvas"));
    button.addEventListener("click", () => this.app.set({ layer, head }));
    this.cells.set(`${layer}/${head}`, button);
    return button;
  }

  /** Paints every map for a query, and marks the chosen one. */
  render(maps, query) {
    const { layer: chosenLayer, head: chosenHead, direction, scale } = this.app.state;
    const shown = new Map();
    let top = 0;
    for (const key of this.cells.keys()) {
      const [layer, head] = splitKey(key);
      if (!maps.has(layer)) continue;
      const weights = maps.weights(layer, head, query, direction);
      const most = largest(weights);
      shown.set(key, [weights, most]);
      if (typeof head === "number") top = Math.max(top, most);
    }
    for (const [key, button] of this.cells) {
      const [layer, head] = splitKey(key);
      const chosen = layer === chosenLayer && head === chosenHead;
      button.setAttribute("aria-pressed", chosen);
      button.tabIndex = chosen ? 0 : -1;
      button.disabled = !shown.has(key);
      if (button.disabled) continue;
      button.firstChild.hidden = head === "gradient" && !maps.relevance; // until it is asked for
      const [weights, most] = shown.get(key);
      paint(button.firstChild, weights, maps.grid, scale === "one" && !(head in SHORT) ? top : most);
    }
  }

  /** Says each head's numbers, which the charts draw. */
  describe(maps, kl) {
    for (const [key, button] of this.cells) {
      const [layer, head] = splitKey(key);
      const name = `Block ${layer}, ${typeof head === "number" ? `head ${head}` : head}`;
      let text = name;
      if (typeof head === "number" && maps.has(layer)) {
        const parts = [
          `entropy ${maps.entropy(layer, head).toFixed(2)} nats`,
          `mean distance ${maps.distance(layer, head).toFixed(2)} tokens`,
        ];
        const far = kl(layer, head);
        if (far !== null) parts.push(`KL ${far.toFixed(3)}`);
        text = `${name}: ${parts.join(", ")}`;
      }
      button.setAttribute("aria-label", text);
      button.title = text.replace(": ", "\n").replaceAll(", ", "\n").replace("\n", ", ");
    }
  }

  move(event) {
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
    const cell = event.target.closest(".cell");
    if (!cell || !(event.key in steps)) return;
    event.preventDefault();
    event.stopPropagation();
    const { maps } = this.app;
    const columns = this.columns(maps);
    const [down, right] = steps[event.key];
    const [layer, head] = splitKey(`${cell.dataset.layer}/${cell.dataset.head}`);
    const column = columns.indexOf(head) + right;
    const next = this.cells.get(`${layer + down}/${columns[column]}`);
    if (!next || next.disabled) return;
    this.app.set({ layer: layer + down, head: columns[column] });
    next.focus();
  }
}

const SHORT = { rollout: "roll.", gradient: "grad." };

/** The columns of the grid, in their order. */
export function columnsOf(maps) {
  const more = maps.header.explains ? ["gradient"] : [];
  return [...Array(maps.heads).keys(), "mean", "rollout", ...more];
}

function splitKey(key) {
  const [layer, head] = key.split("/");
  return [Number(layer), /^\d+$/.test(head) ? Number(head) : head];
}

function label(text, kind, short) {
  const element = document.createElement("span");
  element.className = `label ${kind}`;
  element.textContent = text;
  element.dataset.short = short ?? "";
  return element;
}
