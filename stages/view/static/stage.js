// The large picture: a photo with the map of one head, beside it a student's.

import { $, rangeOf, short } from "./dom.js";
import { drawPane, makePane } from "./draw.js";
import { headline } from "./facts.js";
import { capped } from "./maps.js";

export class Stage {
  constructor(app) {
    this.app = app;
    this.panes = $("panes").children;
  }

  makePane() {
    const pane = makePane();
    const canvas = pane.querySelector("canvas");
    canvas.addEventListener("pointermove", (event) => {
      if (event.pointerType === "mouse") this.app.preview(this.queryAt(canvas, event));
    });
    canvas.addEventListener("pointerleave", () => this.app.preview(null));
    canvas.addEventListener("click", (event) => this.app.choosePatch(this.queryAt(canvas, event)));
    return pane;
  }

  /** The patch at a pointer. */
  queryAt(canvas, event) {
    const box = canvas.getBoundingClientRect();
    const [h, w] = this.app.maps.grid;
    const within = (share, size) => Math.min(Math.max(Math.floor(share * size), 0), size - 1);
    const x = within((event.clientX - box.left) / box.width, w);
    return within((event.clientY - box.top) / box.height, h) * w + x;
  }

  /** Shows panes, each with the name, the maps and the picture. */
  render(panes, query) {
    const { layer, head, direction, opacity, style, floor } = this.app.state;
    while (this.panes.length > panes.length) this.panes[0].remove();
    while (this.panes.length < panes.length) $("panes").append(this.makePane());
    this.shown = panes.map(({ name, maps, picture }) => {
      const there = maps.has(layer);
      const nothing = new Float32Array(maps.tokens);
      let weights = there ? maps.weights(layer, head, query, direction) : nothing;
      if (this.app.state.capped) weights = capped(weights, maps.grid);
      const gaussian = there && direction === "from" ? maps.gaussian(layer, head, query) : null;
      const { crop, grid } = maps.header;
      const hidden = maps === this.app.own ? (this.app.tested?.patches ?? []) : [];
      return { name, maps, picture, crop, weights, grid, opacity, style, query, gaussian, there, hidden };
    });
    const own = this.shown.map(({ weights }) => rangeOf(weights)).map(([low, top]) => [floor * low, top]);
    const least = Math.min(...own.map(([low]) => low));
    const most = Math.max(...own.map(([, top]) => top));
    this.ranges = this.app.rival ? own : [[least, most]]; // each class has a scale of its own
    const ends = (end) => new Set(this.ranges.map((range) => short(range[end])));
    $("least").textContent = [...ends(0)].join(", ");
    $("most").textContent = [...ends(1)].join(", ");
    this.shown.forEach((seen, place) => {
      const pane = this.panes[place];
      const said = this.app.says(seen);
      const [low, top] = this.ranges[place] ?? this.ranges[0];
      drawPane(pane, { ...seen, range: [low, top || 1] });
      pane.dataset.title = headline(this.app, seen);
      pane.querySelector("canvas").ariaLabel = said;
      pane.lastChild.textContent = said;
    });
  }
}
