// The page: one state, what it needs, and the parts that show it.

import { $, ending, make } from "./dom.js";
import { ComparedMaps, Maps, divergence } from "./maps.js";
import { DEFAULTS, fitState, formatState, parseState } from "./state.js";
import { openSource } from "./source.js";
import { composed, setColours } from "./draw.js";
import { asJson, save } from "./numbers.js";
import { Gallery } from "./gallery.js";
import { Grid } from "./grid.js";
import { renderCharts } from "./charts.js";
import { Stage } from "./stage.js";
import { renderFacts, renderHeading, sentence } from "./facts.js";
import { listenToKeys, setDirection } from "./keys.js";

const source = openSource();
const RELOAD = ["split", "image", "view", "student"]; // what other numbers are needed for

const app = {
  about: null,
  classNames: [],
  pixelsReady: false,
  state: { ...DEFAULTS },
  own: null, // Maps of the store or, where there is none or one is chosen, of a model
  compared: null, // ComparedMaps: the stored maps for a student's blocks
  picture: null,
  hovered: null,

  /** The maps that the grid shows. */
  get maps() {
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
    if (this.own) fitState(this.state, this.about, this.maps);
    writeAddress();
    if (!this.own) return;
    if (changed.includes("explain")) await explain();
    render();
  },

  /** Reads how far the server is. */
  watch: () => watch(),

  choose(image) {
    return this.set({ image, view: 0 });
  },

  /** Chooses a patch; the one that is chosen gives way to the mean over all. */
  choosePatch(query) {
    const { state } = this;
    return this.set({ query: query === state.query ? "mean" : query });
  },

  /** Opens an image file by its name or path, or one that was dropped. */
  async add(name, file) {
    say("");
    try {
      const image = await source.add(name, file);
      await watch();
      gallery.asked = null;
      await this.choose(image);
    } catch (error) {
      if (error.unreachable) fail(error);
      else say(error.message);
    }
  },

  /** Shows a query while the pointer is over it. */
  preview(query) {
    if (query === this.hovered || !this.own) return;
    this.hovered = query;
    renderMaps();
  },

  says: (pane) => sentence(app, pane, className),
};

const gallery = new Gallery(source, app);
const grid = new Grid(app);
const stage = new Stage(app);
const className = (label) => gallery.className(label);

function startState() {
  const embedded = $("embedded");
  return embedded ? JSON.parse(embedded.textContent).start : {};
}

function writeAddress(push = false) {
  const address = formatState(app.state);
  if (address === location.hash || location.protocol === "about:") return; // a notebook's frame
  if (push) history.pushState(null, "", address);
  else history.replaceState(null, "", address);
}

let loads = 0;

/** Gets what the state needs, and shows it. */
async function load(push = true) {
  const mine = ++loads;
  const { state, about } = app;
  const hasStored = about.stored && state.split === "train";
  if (!hasStored && !state.student) state.student = about.students[0] ?? "";
  $("stage").setAttribute("aria-busy", "true");
  try {
    const wanted = [source.image(state), app.pixelsReady ? loadPicture() : null];
    const [{ header, arrays }, picture] = await Promise.all(wanted);
    if (mine !== loads) return;
    app.picture = picture;
    app.own = new Maps(header, arrays.maps, arrays.gaussians);
    app.compared = arrays.teacher ? new ComparedMaps(header, arrays.teacher) : null;
    fitState(state, about, app.maps);
    if (state.head === "gradient") await explain();
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
  if (app.own.header.explains && !app.own.relevance) explain().then(() => mine === loads && render());
  await gallery.follow();
}

/** Reads the address. Of a student that there is not it takes the first, and says so. */
function readAddress() {
  const { students, note } = app.about;
  const state = Object.assign(app.state, parseState(location.hash, startState()));
  const known = !state.student || students.includes(state.student);
  const others = students.length ? ` There is: ${students.join(", ")}.` : "";
  const unknown = known ? "" : `There is no student “${state.student}” here.${others}`;
  if (!known) state.student = DEFAULTS.student;
  say([note, unknown].filter(Boolean).join(" "));
}

/** A line above the page, with buttons at its end. */
function say(text, ...buttons) {
  $("banner").replaceChildren(text, ...buttons);
  $("banner").hidden = !text;
}

/** Gets the relevance for the class that is explained. */
async function explain() {
  const { state, own } = app;
  try {
    const { header, arrays } = await source.relevance(state);
    own.relevance = arrays.relevance;
    own.relevanceClass = header.class;
  } catch (error) {
    say(`No gradient: ${error.message}`);
    own.header.explains = false;
    own.columns = own.columns.filter((head) => head !== "gradient");
    fitState(state, app.about, app.maps);
  }
}

function loadPicture() {
  return new Promise((resolve) => {
    const picture = new Image();
    picture.onload = () => resolve(picture);
    picture.onerror = () => resolve(null);
    picture.src = source.pixels(app.state);
  });
}

/** Says in place of the maps why there are none. Where the server does not answer the page stays as
 * it was, and says how to go on. */
function fail(error) {
  if (error?.unreachable) {
    const { command } = app.about ?? {};
    const again = make("button", { textContent: "Try again" });
    const still = () => again.animate({ opacity: [0.3, 1] }, 400);
    again.addEventListener("click", () => source.about().then(() => location.reload(), still));
    say(`${error.message} Start it again: `, make("code", {}, command ?? "gaupipe view"), again);
    return;
  }
  $("error").hidden = !error;
  $("error").textContent = error?.message ?? "";
  $("stage").classList.toggle("failed", Boolean(error));
  document.querySelector(".side").classList.toggle("failed", Boolean(error));
  if (!error) return;
  app.own = app.compared = null;
  $("title").textContent = `Image ${app.state.image}`;
  $("verdict").textContent = "\u00a0";
  if (gallery.items.length) gallery.mark(app.state.image);
  else gallery.load();
  writeAddress(true);
}

/** The student's divergence of each head from the teacher, computed once. */
function kl() {
  const { own, compared } = app;
  own.kl ??= new Map();
  return (layer, head) => {
    if (!compared) return null;
    const key = `${layer}/${head}`;
    if (!own.kl.has(key)) own.kl.set(key, divergence(own, compared, layer, head, "mean"));
    return own.kl.get(key);
  };
}

function panes() {
  const { own, compared, picture } = app;
  const one = { name: ending(own.header.name), maps: own, picture };
  return compared ? [{ name: "teacher", maps: compared, picture }, one] : [one];
}

function render() {
  const { state, maps, own, about } = app;
  const { header } = own;
  document.documentElement.dataset.theme = state.theme;
  const shape = `${maps.layers} blocks × ${maps.heads} heads, ${maps.grid.join(" × ")} patches`;
  $("about").textContent = `${app.named} · ${shape}`;
  $("split").value = state.split;
  $("view-choice").hidden = about.views === 1 || state.split !== "train";
  $("no-teacher").hidden = !header.no_teacher;
  $("no-teacher").textContent = `No teacher beside ${header.name}: ${header.no_teacher}.`;
  renderExplained();
  grid.build(maps);
  grid.describe(maps, kl());
  renderCharts(maps, state, kl(), (layer, head) => app.set({ layer, head }));
  renderHeading(app, className);
  $("student").value = state.student;
  $("view").value = state.view;
  $("opacity").value = state.opacity;
  $("scale").checked = state.scale === "one";
  $("floor").checked = state.floor === "least";
  $("smooth").checked = Boolean(state.smooth);
  $("ellipse").checked = Boolean(state.ellipse);
  $("ellipse-choice").hidden = !maps.gaussians;
  $("show-choice").hidden = !app.compared;
  renderTokens(maps);
  for (const name of ["direction", "show"]) {
    for (const button of document.querySelectorAll(`[data-${name}]`)) {
      button.setAttribute("aria-pressed", button.dataset[name] === state[name]);
    }
  }
  renderMaps();
}

/** The classes that can be explained, the likeliest first. */
function renderExplained() {
  const { header, relevanceClass } = app.own;
  $("explain-choice").hidden = app.state.head !== "gradient" || source.offline;
  if ($("explain-choice").hidden) return;
  const { likely } = header;
  const others = [...Array(app.about.classes).keys()].filter((label) => !likely.includes(label));
  const options = [...likely, ...others].map((label) => new Option(className(label), label));
  $("explain").replaceChildren(...options);
  $("explain").value = relevanceClass ?? likely[0];
}

/** A button for the class token, each register token, and the mean over patches. */
function renderTokens(maps) {
  const tokens = maps.extra.map((name, p) => [`x${p}`, p ? name : "class token"]);
  $("tokens").replaceChildren(
    ...[...tokens, ["mean", "all patches"]].map(([query, name]) => {
      const button = make("button", { textContent: name, ariaPressed: app.state.query === query });
      button.dataset.query = query;
      button.addEventListener("click", () => app.set({ query }));
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
  if (hovered === null) $("says").textContent = stage.shown.map(app.says).join(" ");
  renderFacts(app, query, className);
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
    if (app.own) await load(false);
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
}

function isDark() {
  const { theme } = app.state;
  return theme === "auto" ? matchMedia("(prefers-color-scheme: dark)").matches : theme === "dark";
}

/** Calls `act` with a control's new value. */
function onChange(id, act, event = "change") {
  $(id).addEventListener(event, () => act($(id).type === "checkbox" ? $(id).checked : $(id).value));
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
  onChange("opacity", (value) => app.set({ opacity: Number(value) }), "input");
  onChange("ellipse", (on) => app.set({ ellipse: Number(on) }));
  onChange("scale", (on) => app.set({ scale: on ? "one" : "own" }));
  onChange("floor", (on) => app.set({ floor: on ? "least" : "zero" }));
  onChange("smooth", (on) => app.set({ smooth: Number(on) }));
  onChange("explain", (value) => app.set({ explain: Number(value) }));
  onChange("student", (student) => app.set({ student, page: 0 }));
  onChange("split", (split) => app.set({ split, image: 0, view: 0, page: 0 }));
  onChange("view", (value) => app.set({ view: Number(value) }));
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
  window.addEventListener("dragover", (event) => event.preventDefault());
  window.addEventListener("drop", async (event) => {
    event.preventDefault(); // else the browser leaves the page for the file
    for (const file of event.dataTransfer.files) await app.add(file.name, file);
  });
}

function fileName(ending) {
  const { image, layer, head, query } = app.state;
  const name = app.own.header.title?.replace(/\.\w+$/, "") ?? `image${image}`;
  return `${name}-block${layer}-head${head}-query${query}.${ending}`;
}

function saveJson() {
  const text = JSON.stringify(asJson(app.state, app.own, app.compared));
  save(new Blob([text], { type: "application/json" }), fileName("json"));
}

function savePng() {
  const where = `${$("title").textContent}. Block ${app.state.layer}, head ${app.state.head}.`;
  const canvas = composed(stage.shown, `${where} ${$("says").textContent}`);
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
  $("adds").hidden = !about.adds;
  Object.assign(DEFAULTS, about.start, { split: about.split });
  if (!about.stored) DEFAULTS.student = about.students[0] ?? "";
  readAddress();
  document.documentElement.dataset.theme = state.theme;
  gallery.fillClasses(about.classes);
  await watch();
  await load(false);
  document.documentElement.dataset.ready = "true";
}

open();
