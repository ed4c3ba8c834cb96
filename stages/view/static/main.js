// The page: one state, what it needs, and the parts that show it.

import { $, ending } from "./dom.js";
import { ComparedMaps, Maps, divergence } from "./rows.js";
import { DEFAULTS, fitState, formatState, parseState } from "./state.js";
import { openSource } from "./source.js";
import { composed, setColours } from "./draw.js";
import { asJson, save } from "./numbers.js";
import { Gallery } from "./gallery.js";
import { Grid } from "./grid.js";
import { renderCharts } from "./charts.js";
import { Stage } from "./stage.js";
import { renderFacts, renderHeading } from "./facts.js";
import { listenToKeys, setDirection } from "./keys.js";

const source = openSource();
const RELOAD = ["split", "image", "view", "student"]; // what other numbers are needed for

const app = {
  about: null,
  classNames: [],
  pixelsReady: false,
  state: { ...DEFAULTS },
  stored: null, // Maps of the store or, where there is none, of the model that is chosen
  own: null, // Maps of the student
  compared: null, // ComparedMaps: the stored maps for the student's blocks
  picture: null,
  hovered: null,

  /** The maps that the grid shows. */
  get maps() {
    if (!this.own) return this.stored;
    return this.state.show === "teacher" && this.compared ? this.compared : this.own;
  },

  /** Changes the state, the address and the page. */
  async set(changes) {
    const before = { ...this.state };
    Object.assign(this.state, changes);
    const changed = Object.keys(DEFAULTS).filter((name) => before[name] !== this.state[name]);
    if (!changed.length) return;
    if (RELOAD.some((name) => changed.includes(name))) {
      await load();
      return;
    }
    if (this.stored) fitState(this.state, this.about, this.maps);
    writeAddress();
    if (this.stored && ["head", "explain"].some((name) => changed.includes(name))) await explain();
    if (this.stored) render();
  },

  /** Reads how far the server is. */
  watch: () => watch(),

  choose(image) {
    return this.set({ image, view: 0 });
  },

  /** Shows a query while the pointer is over it. */
  preview(query) {
    if (query === this.hovered || !this.stored) return;
    this.hovered = query;
    renderMaps();
  },

  /** One sentence about a pane, for those who cannot see it. */
  says({ name, weights, grid, query, there }) {
    if (!there) return `${name}: no stored map for this block.`;
    const { layer, head, direction } = app.state;
    const place = (token) =>
      typeof token === "number"
        ? `row ${Math.floor(token / grid[1])}, column ${token % grid[1]}`
        : `the ${app.maps.extra[app.maps.row(token)]} token`;
    let most = 0;
    weights.forEach((weight, token) => {
      if (weight > weights[most]) most = token;
    });
    const which = `block ${layer}, ${typeof head === "number" ? `head ${head}` : head}`;
    const much = weights[most].toPrecision(3);
    if (query === "mean") return `${name}, ${which}: on average, most attention goes to ${place(most)} (${much})`;
    if (direction === "to") return `${name}, ${which}: ${place(query)} is read most by ${place(most)} (${much})`;
    return `${name}, ${which}: ${place(query)} looks most at ${place(most)} (${much})`;
  },
};

const gallery = new Gallery(source, app);
const grid = new Grid(app);
const stage = new Stage(app);

function startState() {
  const embedded = $("embedded");
  return embedded ? JSON.parse(embedded.textContent).start : {};
}

function writeAddress(push = false) {
  const address = formatState(app.state);
  if (address === location.hash) return;
  if (push) history.pushState(null, "", address);
  else history.replaceState(null, "", address);
}

let loads = 0;

/** Gets what the state needs, and shows it. */
async function load(push = true) {
  const mine = ++loads;
  const { state, about } = app;
  if (!hasStored() && !state.student) state.student = about.students[0] ?? "";
  $("stage").setAttribute("aria-busy", "true");
  try {
    const wanted = [hasStored() ? source.image(state) : source.student(state)];
    if (hasStored() && state.student) wanted.push(source.student(state));
    const [stored, own] = await Promise.all(wanted);
    const picture = app.pixelsReady ? await loadPicture() : null;
    if (mine !== loads) return;
    const { teacher, ...maps } = own?.arrays ?? {};
    app.stored = new Maps(stored.header, stored.arrays);
    app.own = own ? new Maps(own.header, maps) : null;
    app.compared = teacher ? new ComparedMaps(own.header, teacher) : null;
    app.picture = picture;
    fitState(state, about, app.maps);
    await explain();
  } catch (error) {
    if (mine === loads) fail(error);
    return;
  } finally {
    if (mine === loads) $("stage").removeAttribute("aria-busy");
  }
  fail(null);
  writeAddress(push);
  gallery.mark(state.image);
  render();
  await gallery.follow();
}

/** Whether the store has maps of the images that are shown. */
function hasStored() {
  return app.about.stored && app.state.split === "train";
}

/** Reads the address. Of a student that there is not it takes the first, and says so. */
function readAddress() {
  const { students, note } = app.about;
  const state = Object.assign(app.state, parseState(location.hash, startState()));
  const known = !state.student || students.includes(state.student);
  const others = students.length ? ` There is: ${students.join(", ")}.` : "";
  const unknown = known ? "" : `There is no student “${state.student}” here.${others}`;
  if (!known) state.student = DEFAULTS.student;
  $("banner").textContent = [note, unknown].filter(Boolean).join(" ");
  $("banner").hidden = !$("banner").textContent;
}

/** Gets the relevance for the class that is explained. */
async function explain() {
  const { state, maps } = app;
  if (state.head !== "gradient") return;
  try {
    maps.explain(await source.relevance(state));
  } catch (error) {
    fail(error);
  }
}

function loadPicture() {
  const { image, view, split } = app.state;
  return new Promise((resolve) => {
    const picture = new Image();
    picture.onload = () => resolve(picture);
    picture.onerror = () => resolve(null);
    picture.src = source.pixels(image, { view, split });
  });
}

/** Says in place of the maps why there are none. */
function fail(error) {
  $("error").hidden = !error;
  $("error").textContent = error?.message ?? "";
  $("stage").classList.toggle("failed", Boolean(error));
  document.querySelector(".side").classList.toggle("failed", Boolean(error));
  if (!error) return;
  app.stored = app.own = app.compared = null;
  $("title").textContent = `Image ${app.state.image}`;
  $("verdict").textContent = "\u00a0";
  gallery.mark(app.state.image);
  writeAddress(true);
}

function kl() {
  const { own, compared } = app;
  if (!compared) return null;
  return (layer, head) =>
    own.kept(`kl/${layer}/${head}`, () => divergence(own, compared, layer, head, "mean"));
}

function panes() {
  const { stored, own, compared, picture, state } = app;
  if (!own) return [{ name: ending(stored.header.name), maps: stored, picture }];
  const student = { name: state.student, maps: own, picture };
  return compared ? [{ name: "teacher", maps: compared, picture }, student] : [student];
}

function render() {
  const { state, maps, about } = app;
  const live = app.own ?? app.stored;
  document.documentElement.dataset.theme = state.theme;
  const shape = `${maps.layers} blocks × ${maps.heads} heads, ${maps.grid.join(" × ")} patches`;
  $("about").textContent = `${app.named} · ${shape}`;
  $("split").value = state.split;
  $("view-choice").hidden = about.views === 1 || state.split !== "train";
  const reason = live.header.no_teacher;
  $("no-teacher").hidden = !reason;
  $("no-teacher").textContent = `No teacher beside ${live.header.name}: ${reason}.`;
  renderExplained(maps);
  grid.build(maps);
  grid.describe(maps, kl() ?? (() => null));
  renderCharts(maps, state, kl(), (layer, head) => app.set({ layer, head }));
  renderHeading(app, (label) => gallery.className(label));
  $("student").value = state.student;
  $("view").value = state.view;
  $("opacity").value = state.opacity;
  $("scale").checked = state.scale === "one";
  $("smooth").checked = Boolean(state.smooth);
  $("ellipse").checked = Boolean(state.ellipse);
  $("ellipse-choice").hidden = !maps.arrays.gaussians;
  $("show-choice").hidden = !app.compared;
  renderExtra(maps);
  for (const name of ["direction", "show"]) {
    for (const button of document.querySelectorAll(`[data-${name}]`)) {
      button.setAttribute("aria-pressed", button.dataset[name] === state[name]);
    }
  }
  renderMaps();
}

/** The classes that can be explained, the likeliest first. */
function renderExplained(maps) {
  const { explains, likely = [] } = maps.header;
  $("explain-choice").hidden = !explains || app.state.head !== "gradient" || source.offline;
  const others = [...Array(app.about.classes).keys()].filter((label) => !likely.includes(label));
  const options = [...likely, ...others].map((label) => new Option(gallery.className(label), label));
  $("explain").replaceChildren(...options);
  $("explain").value = maps.relevance?.header.class ?? likely[0];
}

/** A button for the class token and each register token. */
function renderExtra(maps) {
  const { state } = app;
  $("extra").hidden = !maps.extra.length;
  $("extra").replaceChildren(
    ...maps.extra.map((name, p) => {
      const button = document.createElement("button");
      button.textContent = name;
      button.title = p ? name : `${name} (c)`;
      button.setAttribute("aria-pressed", state.query === `x${p}`);
      button.addEventListener("click", () => app.set({ query: `x${p}` }));
      return button;
    }),
  );
}

/** What changes while the pointer moves. */
function renderMaps() {
  const { state, maps, hovered } = app;
  const query = hovered ?? state.query;
  stage.render(panes(), query);
  grid.render(maps, query);
  $("no-query").disabled = state.query === "mean";
  if (hovered === null) $("says").textContent = `${stage.shown.map(app.says).join(". ")}.`;
  renderFacts(app, query, (label) => gallery.className(label));
}

let watches = 0;

/** Reads how far the server is, until it has read everything. */
async function watch() {
  const mine = ++watches;
  let status;
  try {
    status = await source.status(app.state);
  } catch (error) {
    fail(error);
    return;
  }
  if (mine !== watches) return;
  fillSplits(status.splits);
  const named = status.class_names.length && !app.classNames.length;
  const pictured = status.pixels.ready && !app.pixelsReady;
  app.classNames = status.class_names;
  app.pixelsReady = status.pixels.ready;
  gallery.progress(status.labels);
  if (named) gallery.fillClasses(app.about.classes);
  if (named || pictured) {
    gallery.render();
    if (pictured && app.stored) {
      app.picture = await loadPicture();
    }
    if (app.stored) render();
  }
  const note = status.pixels.error;
  $("no-picture").hidden = !note;
  $("no-picture").textContent = `No pictures: ${note}`;
  if (source.offline || (!status.labels.reading && (status.pixels.ready || note))) return;
  setTimeout(() => mine === watches && watch(), 400);
}

const SPLITS = { train: "training", val: "validation", test: "test" };

function fillSplits(splits) {
  const names = Object.keys(splits);
  const count = (name) => splits[name].toLocaleString("en");
  const options = names.map((name) => new Option(`${SPLITS[name]} (${count(name)})`, name));
  $("split").replaceChildren(...options);
  $("split").value = app.state.split;
  $("split-choice").hidden = names.length < 2;
  $("go-to").max = splits[app.state.split] - 1;
}

function isDark() {
  const { theme } = app.state;
  return theme === "auto" ? matchMedia("(prefers-color-scheme: dark)").matches : theme === "dark";
}

function listen() {
  listenToKeys(app, grid, gallery);
  for (const button of document.querySelectorAll("[data-show]")) {
    button.addEventListener("click", () => app.set({ show: button.dataset.show }));
  }
  for (const button of document.querySelectorAll("[data-direction]")) {
    button.addEventListener("click", () => setDirection(app, button.dataset.direction));
  }
  $("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address holds the state
    $("stage").focus();
  });
  $("no-query").addEventListener("click", () => app.set({ query: "mean" }));
  $("opacity").addEventListener("input", () => app.set({ opacity: Number($("opacity").value) }));
  $("ellipse").addEventListener("change", () => app.set({ ellipse: Number($("ellipse").checked) }));
  $("scale").addEventListener("change", () => {
    app.set({ scale: $("scale").checked ? "one" : "own" });
  });
  $("smooth").addEventListener("change", () => app.set({ smooth: Number($("smooth").checked) }));
  $("explain").addEventListener("change", () => app.set({ explain: Number($("explain").value) }));
  $("student").addEventListener("change", () => app.set({ student: $("student").value, page: 0 }));
  $("split").addEventListener("change", () => {
    app.set({ split: $("split").value, image: 0, view: 0, page: 0 });
  });
  $("view").addEventListener("change", () => app.set({ view: Number($("view").value) }));
  $("image-back").addEventListener("click", () => gallery.next(-1));
  $("image-on").addEventListener("click", () => gallery.next(1));
  $("help-button").addEventListener("click", () => $("help").showModal());
  $("theme").addEventListener("click", () => {
    app.set({ theme: isDark() ? "light" : "dark" });
    document.documentElement.dataset.theme = app.state.theme;
  });
  $("json").addEventListener("click", saveJson);
  $("png").addEventListener("click", savePng);
  $("link").addEventListener("click", async () => {
    await navigator.clipboard.writeText(location.href);
    $("link").textContent = "Copied";
    setTimeout(() => ($("link").textContent = "Copy link"), 1500);
  });
  window.addEventListener("popstate", async () => {
    readAddress();
    await load(false);
  });
}

function fileName(ending) {
  const { image, layer, head, query } = app.state;
  return `image${image}-block${layer}-head${head}-query${query}.${ending}`;
}

function saveJson() {
  const { state, stored, own, compared } = app;
  const text = JSON.stringify(asJson(state, own ?? stored, compared));
  save(new Blob([text], { type: "application/json" }), fileName("json"));
}

function savePng() {
  const text = `${$("title").textContent}. ${$("says").textContent}`;
  const canvas = composed(stage.shown, text);
  canvas.toBlob((blob) => save(blob, fileName("png")));
}

async function open() {
  listen();
  try {
    app.about = await source.about();
  } catch (error) {
    fail(error);
    return;
  }
  const { about, state } = app;
  setColours(about.colours);
  stage.setColours();
  const kind = about.k ? `${about.kind}, k = ${about.k}` : about.kind;
  app.named = `${ending(about.title)} · ${kind}`;
  document.querySelector("#gallery .choices").hidden ||= !about.labelled; // nothing to order by
  $("about").title = about.title;
  $("student").append(...about.students.map((name) => new Option(name, name)));
  if (!about.stored) $("student").remove(0); // "none"
  $("student-choice").hidden = !about.students.length;
  $("view").max = about.views - 1;
  $("views").textContent = `of 0 to ${about.views - 1}`;
  DEFAULTS.split = about.split;
  if (!about.stored) DEFAULTS.student = about.students[0] ?? "";
  readAddress();
  document.documentElement.dataset.theme = state.theme;
  gallery.fillClasses(about.classes);
  await watch();
  await load(false);
  document.documentElement.dataset.ready = "true";
}

open();
