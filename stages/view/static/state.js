// What is shown, all of it in the address, so that a link shows the same.

export const DEFAULTS = {
  split: "", // whose images: "train", "val" or "test"; "" is the page's first
  image: 0,
  view: 0,
  layer: 0, // with head and query as the server says what to open with
  head: "mean", // a number, "mean", "rollout" or "gradient"
  query: "mean", // a number, "mean", or "x0" for the class token, "x1", ... for registers
  direction: "from", // "from": what the query reads; "to": which queries read this key
  student: "",
  explain: "top", // the class that "gradient" explains; "top" is the predicted one
  beside: "none", // another class, whose gradient is shown beside it
  show: "student", // whose maps the grid of heads shows, beside a student
  opacity: 0.5,
  style: "spotlight", // or "squares", "heat"
  capped: 0, // 1: a lone bright patch is no brighter than its neighbours
  floor: 0, // 1: light and colours begin at the least weight
  scale: 0, // 1: one colour scale for all heads
  order: "id",
  class: "",
  page: 0,
};

/** The words that a part of the state may be. */
export const WORDS = {
  split: ["train", "val", "test"],
  head: ["mean", "rollout", "gradient"],
  query: ["mean"],
  direction: ["from", "to"],
  show: ["student", "teacher"],
  style: ["spotlight", "squares", "heat"],
  explain: ["top"],
  beside: ["none"],
  order: ["id", "wrong", "sure", "unsure"],
};

/** A value as an address or a control says it: a number where it is one. */
export const parsed = (text) => (/^\d{1,9}(\.\d{1,3})?$/.test(text) ? Number(text) : text);

/** The state that an address says; what it does not say, or says wrongly, is the default. */
export function parseState(hash, start = {}) {
  const state = { ...DEFAULTS, ...start };
  for (const [name, text] of new URLSearchParams(hash.replace(/^#/, ""))) {
    if (!Object.hasOwn(DEFAULTS, name)) continue;
    const value = parsed(text);
    const isExtra = name === "query" && /^x\d{1,2}$/.test(text); // a class or register token
    const takesNumbers =
      typeof DEFAULTS[name] === "number" || ["head", "query", "class", "explain", "beside"].includes(name);
    const isFile = name === "image" && typeof value === "string" && text; // it is called by its name
    if (name === "student" || isFile || isExtra || WORDS[name]?.includes(text)) state[name] = text;
    else if (typeof value === "number" && takesNumbers) state[name] = value;
  }
  return state;
}

/** The address of a state: what differs from the defaults, and always the image, by its `file` where
 * that has a name for itself. */
export function formatState(state, file) {
  const said = new URLSearchParams();
  for (const name of Object.keys(DEFAULTS)) {
    if (name === "image") said.set(name, file ?? state.image);
    else if (state[name] !== DEFAULTS[name]) said.set(name, state[name]);
  }
  return `#${said}`;
}

/** The patch in the middle of a grid. */
export const middle = ([h, w]) => Math.floor(h / 2) * w + Math.floor(w / 2);

/** The nearest state that a store can show. */
export function fitState(state, about, maps) {
  const within = (value, size) => Math.min(Math.max(Math.round(value), 0), size - 1);
  state.view = within(state.view, about.views);
  state.layer = within(state.layer, maps.layers);
  state.opacity = Math.min(Math.max(state.opacity, 0), 1);
  if (typeof state.head === "number") state.head = within(state.head, maps.heads);
  if (!maps.columns.includes(state.head)) state.head = "mean";
  for (const query of [DEFAULTS.query, "mean"]) {
    if (typeof state.query === "number") state.query = within(state.query, maps.tokens);
    else if (state.query !== "mean" && !(maps.row(state.query) < maps.extra.length)) state.query = query;
  }
  if (state.head === "gradient" && maps.single) Object.assign(state, { query: DEFAULTS.query, direction: "from" });
  if (state.query === "mean") state.direction = "from";
}
