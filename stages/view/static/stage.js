// The large picture: an image with the map of one head, beside it a student's.

import { $, largest } from "./dom.js";
import { drawPicture, paintBar } from "./draw.js";

export class Stage {
  constructor(app) {
    this.app = app;
    this.panes = $("panes");
    this.shown = [];
    new ResizeObserver(() => this.draw()).observe(this.panes);
  }

  setColours() {
    paintBar($("bar"));
  }

  /** Makes one pane for each of `names`. */
  build(names) {
    if (names.join() === this.names?.join()) return;
    this.names = names;
    const figures = names.map((name) => {
      const figure = document.createElement("figure");
      const canvas = document.createElement("canvas");
      canvas.tabIndex = 0;
      canvas.setAttribute("role", "img");
      const query = (event) => this.queryAt(canvas, event);
      canvas.addEventListener("pointermove", (event) => {
        if (event.pointerType === "mouse") this.app.preview(query(event));
      });
      canvas.addEventListener("pointerleave", () => this.app.preview(null));
      canvas.addEventListener("click", (event) => {
        const clicked = query(event);
        this.app.set({ query: clicked === this.app.state.query ? "mean" : clicked });
      });
      const caption = document.createElement("figcaption");
      caption.hidden = names.length === 1;
      figure.append(caption, canvas);
      return figure;
    });
    this.panes.replaceChildren(...figures);
  }

  queryAt(canvas, event) {
    const box = canvas.getBoundingClientRect();
    const [h, w] = this.app.maps.grid;
    const within = (share, n) => Math.min(Math.max(Math.floor(share * n), 0), n - 1);
    const x = within((event.clientX - box.left) / box.width, w);
    const y = within((event.clientY - box.top) / box.height, h);
    return y * w + x;
  }

  /** Shows panes, each with the name, the maps, the picture and whether its Gaussian is drawn. */
  render(panes, query) {
    const { layer, head, direction, opacity, ellipse, smooth } = this.app.state;
    this.build(panes.map((pane) => pane.name));
    this.shown = panes.map(({ name, maps, picture }) => {
      const there = maps.has(layer);
      const weights = there
        ? maps.weights(layer, head, query, direction)
        : new Float32Array(maps.tokens);
      const drawn = ellipse && there && direction === "from";
      const gaussian = drawn ? maps.gaussian(layer, head, query) : null;
      const shown = { name, picture, weights, grid: maps.grid, opacity, query, direction };
      return { ...shown, gaussian, there, smooth };
    });
    const tops = this.shown.map(({ weights }) => largest(weights));
    const most = Math.max(...tops);
    this.shown.forEach((pane, place) => {
      pane.top = most || 1;
      const caption = this.panes.children[place].querySelector("figcaption");
      const here = pane.there ? `up to ${tops[place].toPrecision(3)}` : "no map stored for this block";
      caption.textContent = `${pane.name}, ${here}`;
    });
    $("most").textContent = most.toPrecision(3);
    this.draw();
  }

  draw() {
    this.shown.forEach((seen, place) => {
      const canvas = this.panes.children[place]?.querySelector("canvas");
      if (!canvas) return;
      const [h, w] = seen.grid;
      canvas.style.aspectRatio = `${w} / ${h}`;
      const sharp = Math.min(window.devicePixelRatio || 1, 3);
      const width = Math.round(canvas.clientWidth * sharp);
      const height = Math.round((width * h) / w);
      if (!width) return;
      if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
      drawPicture(canvas.getContext("2d"), [width, height], seen);
      canvas.setAttribute("aria-label", this.app.says(seen));
    });
  }
}
