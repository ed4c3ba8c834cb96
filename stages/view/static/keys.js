// The keyboard.

import { $ } from "./dom.js";

function moveQuery(app, across, down) {
  const { state, maps } = app;
  const [h, w] = maps.grid;
  if (typeof state.query !== "number") {
    app.set({ query: Math.floor(h / 2) * w + Math.floor(w / 2) });
    return;
  }
  const x = Math.min(Math.max((state.query % w) + across, 0), w - 1);
  const y = Math.min(Math.max(Math.floor(state.query / w) + down, 0), h - 1);
  app.set({ query: y * w + x });
}

export function setDirection(app, direction) {
  const { state, maps } = app;
  const [h, w] = maps.grid;
  const middle = Math.floor(h / 2) * w + Math.floor(w / 2);
  const query = direction === "to" && state.query === "mean" ? middle : state.query;
  app.set({ direction, query });
}

function moveHead(app, step) {
  const columns = ["mean", ...app.maps.columns.filter((head) => head !== "mean")];
  const place = columns.indexOf(app.state.head) + step;
  app.set({ head: columns[(place + columns.length) % columns.length] });
}

function moveLayer(app, step) {
  app.set({ layer: Math.min(Math.max(app.state.layer + step, 0), app.maps.layers - 1) });
}

/** What each key does. */
const actions = (app, grid, gallery) => ({
  n: () => gallery.next(1),
  p: () => gallery.next(-1),
  ArrowLeft: () => moveQuery(app, -1, 0),
  ArrowRight: () => moveQuery(app, 1, 0),
  ArrowUp: () => moveQuery(app, 0, -1),
  ArrowDown: () => moveQuery(app, 0, 1),
  Escape: () => app.set({ query: "mean" }),
  c: () => app.maps.extra.length && app.set({ query: "x0", direction: "from" }),
  "[": () => moveLayer(app, -1),
  "]": () => moveLayer(app, 1),
  ",": () => moveHead(app, -1),
  ".": () => moveHead(app, 1),
  m: () => app.set({ head: "mean" }),
  r: () => app.set({ head: "rollout" }),
  g: () => app.maps.header.explains && app.set({ head: "gradient" }),
  b: () => app.set({ smooth: app.state.smooth ? 0 : 1 }),
  t: () => setDirection(app, app.state.direction === "from" ? "to" : "from"),
  s: () => app.set({ show: app.state.show === "student" ? "teacher" : "student" }),
  "+": () => app.set({ opacity: Math.min(Math.round(20 * app.state.opacity + 1) / 20, 1) }),
  "-": () => app.set({ opacity: Math.max(Math.round(20 * app.state.opacity - 1) / 20, 0) }),
  z: () => app.set({ floor: app.state.floor === "zero" ? "least" : "zero" }),
  e: () => app.set({ ellipse: app.state.ellipse ? 0 : 1 }),
  d: () => $("theme").click(),
  "?": () => $("help").showModal(),
});
const WITHOUT_MAPS = ["n", "p", "d", "?"];

/** Makes the page listen to the keyboard. */
export function listenToKeys(app, grid, gallery) {
  const keys = actions(app, grid, gallery);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
    if (event.target.closest("input, select, textarea")) return;
    const act = keys[event.key];
    if (!act || !(app.own || WITHOUT_MAPS.includes(event.key))) return;
    event.preventDefault();
    act();
  });
}
