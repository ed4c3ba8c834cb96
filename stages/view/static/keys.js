// The keyboard.

import { $ } from "./dom.js";
import { middle, WORDS } from "./state.js";

/** Moves the patch, from the middle where there is none. */
function moveQuery({ state, maps }, across, down) {
  const [h, w] = maps.grid;
  if (typeof state.query !== "number") return { query: middle(maps.grid) };
  const x = Math.min(Math.max((state.query % w) + across, 0), w - 1);
  const y = Math.min(Math.max(Math.floor(state.query / w) + down, 0), h - 1);
  return { query: y * w + x };
}

function moveHead({ state, maps }, step) {
  const columns = ["mean", ...maps.columns.filter((head) => head !== "mean")];
  return { head: columns.at((columns.indexOf(state.head) + step) % columns.length) };
}

/** What each key changes. */
const CHANGES = {
  ArrowLeft: (app) => moveQuery(app, -1, 0),
  ArrowRight: (app) => moveQuery(app, 1, 0),
  ArrowUp: (app) => moveQuery(app, 0, -1),
  ArrowDown: (app) => moveQuery(app, 0, 1),
  Escape: () => ({ query: "mean" }),
  c: () => ({ query: "x0", direction: "from" }),
  "[": ({ state }) => ({ layer: Math.max(state.layer - 1, 0) }),
  "]": ({ state }) => ({ layer: state.layer + 1 }),
  ",": (app) => moveHead(app, -1),
  ".": (app) => moveHead(app, 1),
  m: () => ({ head: "mean" }),
  r: () => ({ head: "rollout" }),
  g: () => ({ head: "gradient" }),
  b: ({ state }) => ({ style: WORDS.style[(WORDS.style.indexOf(state.style) + 1) % WORDS.style.length] }),
  k: ({ state }) => ({ capped: 1 - state.capped }),
  t: ({ state }) => ({ direction: state.direction === "from" ? "to" : "from" }),
  s: ({ state, compared }) => compared && { show: state.show === "student" ? "teacher" : "student" },
  z: ({ state }) => ({ floor: 1 - state.floor }),
  "+": ({ state }) => ({ opacity: Math.round(20 * state.opacity + 1) / 20 }),
  "-": ({ state }) => ({ opacity: Math.max(Math.round(20 * state.opacity - 1) / 20, 0) }),
};

/** Makes the page listen to the keyboard. */
export function listenToKeys(app, gallery) {
  const acts = { n: () => gallery.next(1), p: () => gallery.next(-1), "?": () => $("help").showModal() };
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
    if (event.target.closest("input, select, textarea")) return;
    const change = app.own && CHANGES[event.key];
    const act = acts[event.key] ?? (change && (() => app.set(change(app) || {})));
    if (!act) return;
    event.preventDefault();
    act();
  });
}
