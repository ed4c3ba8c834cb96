// The large picture: a photo with the map of one head, beside it a student's.

import { $, extremes, make } from "./dom.js";
import { aspect, drawPicture, paintBar, seenPart } from "./draw.js";

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
    this.panes.style.setProperty("--panes", names.length);
    const figures = names.map((name, place) => {
      const canvas = make("canvas", { tabIndex: 0, role: "img" });
      canvas.addEventListener("pointermove", (event) => {
        if (event.pointerType === "mouse") this.app.preview(this.queryAt(canvas, place, event));
      });
      canvas.addEventListener("pointerleave", () => this.app.preview(null));
      canvas.addEventListener("click", (event) => {
        const clicked = this.queryAt(canvas, place, event);
        if (clicked !== null) this.app.choosePatch(clicked);
      });
      return make("figure", {}, canvas, make("figcaption", {}));
    });
    this.panes.replaceChildren(...figures);
  }

  /** The patch at a pointer, or null outside the part that the model sees. */
  queryAt(canvas, place, event) {
    const box = canvas.getBoundingClientRect();
    const [h, w] = this.app.maps.grid;
    const [left, top, width, height] = seenPart(this.shown[place], [box.width, box.height]);
    const x = Math.floor(((event.clientX - box.left - left) / width) * w);
    const y = Math.floor(((event.clientY - box.top - top) / height) * h);
    return x < 0 || y < 0 || x >= w || y >= h ? null : y * w + x;
  }

  /** Shows panes, each with the name, the maps and the picture. */
  render(panes, query) {
    const { layer, head, direction, opacity, ellipse, smooth, floor } = this.app.state;
    this.build(panes.map((pane) => pane.name));
    this.shown = panes.map(({ name, maps, picture }) => {
      const there = maps.has(layer);
      const weights = there
        ? maps.weights(layer, head, query, direction)
        : new Float32Array(maps.tokens);
      const drawn = ellipse && there && direction === "from";
      const gaussian = drawn ? maps.gaussian(layer, head, query) : null;
      const { grid } = maps;
      const crop = maps.header.crop;
      return { name, picture, crop, weights, grid, opacity, query, gaussian, there, smooth };
    });
    const ranges = this.shown.map(({ weights }) => extremes(weights));
    const least = floor === "least" ? Math.min(...ranges.map(([low]) => low)) : 0;
    const most = Math.max(...ranges.map(([, top]) => top));
    for (const pane of this.shown) pane.range = [least, most || 1];
    $("least").textContent = least ? least.toPrecision(3) : "0";
    $("most").textContent = most.toPrecision(3);
    this.draw();
  }

  draw() {
    this.shown.forEach((seen, place) => {
      const figure = this.panes.children[place];
      const canvas = figure?.firstChild;
      if (!canvas) return;
      const high = aspect(seen);
      figure.style.setProperty("--aspect", 1 / high);
      canvas.style.aspectRatio = `${1 / high}`;
      const sharp = Math.min(window.devicePixelRatio || 1, 3);
      const width = Math.round(canvas.clientWidth * sharp);
      const height = Math.round(width * high);
      if (!width) return;
      if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
      drawPicture(canvas.getContext("2d"), [width, height], seen);
      const said = this.app.says(seen);
      canvas.setAttribute("aria-label", said);
      figure.lastChild.textContent = said;
    });
  }
}
