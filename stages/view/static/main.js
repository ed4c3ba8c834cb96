// The page: one state, what it needs, and the parts that show it.

import { card } from "./card.js";
import { renderCharts } from "./charts.js";
import { $, count, make } from "./dom.js";
import { paintBar, setColours } from "./draw.js";
import { cardLines, renderChips, renderFacts, renderHeading, sentence, testedText } from "./facts.js";
import { Gallery } from "./gallery.js";
import { Grid } from "./grid.js";
import { listenToKeys } from "./keys.js";
import { Maps } from "./maps.js";
import { asJson, save } from "./numbers.js";
import { openSource } from "./source.js";
import { Stage } from "./stage.js";
import { DEFAULTS, fitState, formatState, middle, parsed, parseState } from "./state.js";

const source = openSource();
const RELOAD = ["split", "image", "view", "student"]; // what other numbers are needed for
const SHARE = 0.2; // of the patches that a test hides, as in stages/look/removal.py
const LISTED = ["order", "class", "page"]; // what another page of images is needed for
const CONTROLS = ["student", "split", "view", "order", "explain", "floor", "opacity", "capped", "scale"];

const app = {
  about: null,
  classNames: [],
  pixelsReady: false,
  state: { ...DEFAULTS },
  own: null, // Maps of the store or, where there is none or one is chosen, of a model
  compared: null, // Maps of the store, beside a student's
  rival: null, // Maps with the gradient of another class, which are shown beside
  picture: null,
  tested: null, // the patches that were painted grey, and what became of the prediction
  hovered: null,

  /** The maps that the grid shows. */
  get maps() {
    return this.state.show === "teacher" && this.compared ? this.compared : this.own;
  },

  /** Changes the state, the address and the page. */
  async set(changes) {
    const { state } = app;
    const before = { ...state };
    if ("image" in changes) Object.assign(state, { explain: "top", beside: "none" }); // of that photo
    Object.assign(state, changes);
    if (state.direction !== before.direction && state.query === "mean") state.query = middle(app.maps.grid);
    const elsewhere = state.query !== DEFAULTS.query || state.direction === "to";
    if (elsewhere && !("head" in changes) && isSingle()) state.head = "mean"; // there is one of any query
    const changed = Object.keys(DEFAULTS).filter((name) => before[name] !== state[name]);
    if (changed.some((name) => RELOAD.includes(name))) {
      say("");
      await load();
      return;
    }
    app.tested = null; // it was another map
    if (app.own) fitState(state, app.about, app.maps);
    writeAddress();
    if (changed.some((name) => LISTED.includes(name))) await gallery.load();
    if (!app.own) return;
    if (changed.includes("explain") || changed.includes("beside")) await explain(app.own);
    render();
  },

  /** Reads how far the server is. */
  watch: () => watch(),

  /** Chooses a patch; the one that is chosen gives way to the mean over all. */
  choosePatch(query) {
    return app.set({ query: query === app.state.query ? "mean" : query });
  },

  /** Opens an image file by its name or path, or one that was dropped. */
  async add(name, file) {
    say("");
    try {
      const image = await source.add(name, file);
      await watch();
      gallery.asked = null;
      await app.set({ image, view: 0 });
    } catch (error) {
      if (error.unreachable) fail(error);
      else say(error.message);
    }
  },

  /** Shows a query while the pointer is over it. */
  preview(query) {
    if (query === app.hovered || !app.own) return;
    app.hovered = query;
    renderMaps();
  },

  className: (label) => app.classNames[label] ?? `class ${label}`,

  says: (pane) => sentence(app, pane),
};

const gallery = new Gallery(source, app);
const grid = new Grid(app);
const stage = new Stage(app);

/** Whether the gradient is shown, and known for one query alone. */
const isSingle = () => app.state.head === "gradient" && Boolean(app.maps?.single);

function writeAddress(push = false) {
  const address = formatState(app.state, app.own?.header.file);
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
  $("stage").ariaBusy = "true";
  try {
    if (typeof state.image === "string") state.image = await source.find(state);
    const [own, compared, picture] = await fetched(state);
    if (mine !== loads) return;
    Object.assign(app, { own, compared, picture, tested: null });
    fitState(state, about, app.maps);
    if (state.head === "gradient") await explain(own);
    else app.rival = null;
  } catch (error) {
    if (mine === loads) fail(error);
    if (typeof state.image === "string") state.image = 0;
    return;
  } finally {
    if (mine === loads) $("stage").ariaBusy = null;
  }
  fail(null);
  writeAddress(push);
  render();
  gallery.mark(state.image);
  await gallery.follow();
  complete(mine);
}

/** The maps of a state, those that they are compared with, and the picture. */
async function fetched(state) {
  const asked = [source.image(state), app.pixelsReady ? loadPicture(source.pixels(state)) : null];
  if (state.head === "gradient" && app.own?.header.explains) {
    source.relevance(state).catch(() => {}); // explain waits for it
  }
  const [{ header, arrays }, picture] = await Promise.all(asked);
  const own = new Maps(header, arrays);
  if (!arrays.teacher) return [own, null, picture];
  const others = { ...header, explains: false, numbers: {} };
  return [own, new Maps(others, { maps: arrays.teacher }, header.compared), picture];
}

async function loadPicture(address) {
  const picture = new Image();
  picture.src = address;
  return picture.decode().then(
    () => picture,
    () => null,
  );
}

/** Gets the column of the gradient, then what the images beside this one need, one by one, unless
 * another image is asked for. */
async function complete(mine) {
  const { own } = app;
  if (own.header.explains && !own.relevance) {
    await explain(own);
    if (mine === loads) render();
  }
  await new Promise((drawn) => setTimeout(drawn, 50)); // the server shares this picture's processor
  for (const step of [1, -1]) {
    const item = gallery.beside(step);
    if (mine !== loads || source.offline) return;
    if (!item) continue;
    const state = { ...app.state, image: item.id, view: 0 };
    try {
      const [beside] = await fetched(state);
      if (mine === loads && beside.header.explains) await source.relevance(state);
    } catch {
      return; // who opens that image is told
    }
  }
}

/** The names of classes: of a run or a store as they are; of a model such as ImageNet's, whose
 * classes have synonyms, the first that no other class has too. */
function shortened(names, whole) {
  const first = (name) => name.split(", ")[0];
  const counts = new Map();
  for (const name of names) counts.set(first(name), (counts.get(first(name)) ?? 0) + 1);
  return names.map((name) => (whole || counts.get(first(name)) > 1 ? name : first(name)));
}

/** Gets the relevance for the class that is explained. */
async function explain(own) {
  try {
    const { state, compared } = app;
    const asked = [state.explain === own.header.predicted ? "top" : state.explain];
    if (state.beside !== "none" && !compared) asked.push(state.beside);
    const found = await Promise.all(asked.map((label) => source.relevance(state, label === "top" ? "" : label)));
    const [first, second] = found.map((message) => own.explaining(message));
    Object.assign(own, { relevance: first.relevance, explained: first.explained });
    app.rival = second ?? null;
    fitState(state, app.about, app.maps);
  } catch (error) {
    say(`No gradient: ${error.message}`);
    own.header.explains = false;
    own.columns = own.columns.filter((head) => head !== "gradient");
    fitState(app.state, app.about, app.maps);
  }
}

/** Reads the address. Of a student that there is not it takes the first, and says so. */
function readAddress() {
  const { students, note } = app.about;
  const embedded = $("embedded");
  const start = embedded ? JSON.parse(embedded.textContent).start : {};
  const state = Object.assign(app.state, parseState(location.hash, start));
  const said = [note];
  if (state.student && !students.includes(state.student)) {
    said.push(`There is no student “${state.student}” here. There is: ${students.join(", ") || "none"}.`);
    state.student = DEFAULTS.student;
  }
  say(said.filter(Boolean).join(" "));
}

/** A line above the page, with buttons at its end; it stays until it is closed, or another image is
 * opened. */
function say(text, ...buttons) {
  const close = make("button", { className: "icon", title: "Close", ariaLabel: "Close this line" }, "×");
  close.addEventListener("click", () => say(""));
  $("banner").replaceChildren(make("span", {}, text), ...buttons, close);
  $("banner").hidden = !text;
}

/** Says in place of the maps why there are none. Where the server does not answer the page stays as
 * it was, and says how to go on. */
function fail(error) {
  if (error?.unreachable) {
    const again = make("button", {}, "Try again");
    const still = () => again.animate({ opacity: [0.3, 1] }, 400);
    again.addEventListener("click", () => source.about().then(() => location.reload(), still));
    const command = make("code", {}, app.about?.command ?? "gaupipe view");
    say(`${error.message} Start it again, and open the link that it prints: `, command, again);
    return;
  }
  $("error").hidden = !error;
  $("error").textContent = error?.message ?? "";
  document.body.classList.toggle("failed", Boolean(error));
  if (!error) return;
  app.own = app.compared = null;
  $("title").textContent = `Image ${app.state.image}`;
  $("verdict").textContent = "\u00a0";
  gallery.mark(app.state.image);
  if (!gallery.items.length) gallery.load();
  writeAddress(true);
}

let drawn = null; // the maps whose numbers the cells and charts have

function render() {
  const { state, maps, own, about } = app;
  const { header } = own;
  const shape = `${maps.layers} blocks × ${maps.heads} heads, ${maps.grid.join(" × ")} patches`;
  const kind = about.k ? `${about.kind}, k = ${about.k}` : about.kind;
  $("about").textContent = [about.title, kind, shape].join(" · ");
  $("view-choice").hidden = about.views === 1 || state.split !== "train";
  $("no-teacher").hidden = !header.no_teacher;
  $("no-teacher").textContent = `No teacher beside ${header.name}: ${header.no_teacher}.`;
  $("show-choice").hidden = !app.compared;
  $("test-choice").hidden = !header.tests || source.offline;
  $("classes").hidden = !header.explains || header.predicted === null;
  if (!$("classes").hidden) renderChips(app);
  fillExplained();
  const tokens = maps.extra.map((name, p) => [`x${p}`, name === "class" ? "class token" : name]);
  const buttons = [...tokens, ["mean", "all patches"]].map(([query, name]) =>
    make("button", { data: { query } }, name),
  );
  $("tokens").replaceChildren(...buttons);
  paintBar($("bar"), state.style);
  grid.build(maps);
  if (drawn !== maps) {
    grid.describe(maps);
    renderCharts(maps);
    drawn = maps;
  }
  renderHeading(app);
  for (const name of CONTROLS) {
    if ($(name).type === "checkbox") $(name).checked = Boolean(state[name]);
    else $(name).value = state[name];
  }
  for (const button of document.querySelectorAll("#stage button, .side button")) {
    const sets = Object.entries(button.dataset);
    if (!sets.length) continue;
    button.ariaPressed = sets.every(([name, text]) => state[name] === parsed(text));
    if (button.matches(".cell")) button.tabIndex = button.ariaPressed === "true" ? 0 : -1;
  }
  renderMaps();
}

/** Asks the model again without the brightest patches of what is shown for its own maps. */
async function test() {
  const { state, own } = app;
  const { weights } = stage.shown.find(({ maps }) => maps === own);
  const brightest = [...weights.keys()].sort((a, b) => weights[b] - weights[a]);
  const patches = brightest.slice(0, Math.max(Math.round(SHARE * weights.length), 1));
  const label = state.head === "gradient" ? own.explained.class : own.header.predicted;
  $("test").disabled = true;
  try {
    const found = await source.test(state, label, patches);
    if (app.own !== own) return;
    app.tested = { patches, text: testedText(found, app) };
    renderMaps();
  } catch (error) {
    if (error.unreachable) fail(error);
    else say(error.message);
  } finally {
    $("test").disabled = false;
  }
}

let named = null; // the names that the choice of classes has: they may be a thousand

/** All classes that can be explained. */
function fillExplained() {
  if (named === app.classNames) return;
  named = app.classNames;
  const options = Array.from({ length: app.about.classes }, (_, label) => new Option(app.className(label), label));
  $("explain").replaceChildren(new Option("any class", "top"), ...options);
}

/** What changes while the pointer moves. */
function renderMaps() {
  const { state, maps, own, compared, rival, picture, hovered } = app;
  const query = hovered ?? state.query;
  const large = isSingle() ? state.query : query;
  const panes = [{ name: own.header.name, maps: own, picture }];
  if (compared) panes.unshift({ name: "teacher", maps: compared, picture });
  if (rival && state.head === "gradient") panes.push({ name: own.header.name, maps: rival, picture });
  stage.render(panes, large);
  $("tested").textContent = app.tested?.text ?? "";
  grid.render(maps, query);
  if (hovered === null) $("says").textContent = stage.shown.map(app.says).join(" ");
  renderFacts(app, large);
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
  const isNew = status.pixels.ready && !app.pixelsReady; // pictures, and names of classes
  app.classNames = shortened(status.class_names, app.about.stored || app.about.students.length > 0);
  app.pixelsReady = status.pixels.ready;
  gallery.progress(status.labels);
  if (isNew) {
    gallery.fillClasses();
    gallery.render();
    source.kept.clear(); // in which names and crops are missing
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
  const options = names.map((name) => new Option(`${SPLITS[name]} (${count(splits[name])})`, name));
  $("split").replaceChildren(...options);
  $("split").value = app.state.split;
  $("split-choice").hidden = names.length < 2;
}

function listen() {
  listenToKeys(app, gallery);
  document.querySelector("main").addEventListener("click", ({ target }) => {
    const button = target.closest("button");
    const said = Object.entries(button?.dataset ?? {});
    if (!said.length) return;
    const changes = Object.fromEntries(said.map(([name, text]) => [name, parsed(text)]));
    if (changes.beside === app.state.beside && button.ariaPressed === "true") changes.beside = "none";
    app.set(changes);
  });
  for (const name of CONTROLS) {
    $(name).addEventListener(name === "opacity" ? "input" : "change", () => {
      const { type, checked, value } = $(name);
      const text = type === "checkbox" ? String(Number(checked)) : value;
      const changes = { [name]: name === "student" ? text : parsed(text) };
      if (["student", "split", "order"].includes(name)) changes.page = 0;
      if (name === "explain") changes.head = "gradient";
      if (name === "split") Object.assign(changes, { image: 0, view: 0 });
      gallery.opens = name === "order" && value !== "id"; // the first of them
      app.set(changes);
    });
  }
  const narrow = matchMedia("(max-width: 719px)");
  const place = () => {
    // on a phone the picture comes first; the maps stand under it, and it stays while they are scrolled
    if (narrow.matches) $("test-choice").before($("heads-card"));
    else document.querySelector(".side").prepend($("heads-card"));
    if (narrow.matches) $("stage").after($("gallery"));
    else $("stage").before($("gallery"));
  };
  narrow.addEventListener("change", place);
  place();
  $("skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address holds the state
    $("stage").focus();
  });
  $("help-button").addEventListener("click", () => $("help").showModal());
  $("test").addEventListener("click", test);
  $("json").addEventListener("click", () => {
    save(new Blob([JSON.stringify(asJson(app))], { type: "application/json" }), fileName("json"));
  });
  $("png").addEventListener("click", async () => {
    const panes = [...$("panes").children];
    const sheet = await card(
      panes,
      panes.map((pane) => pane.dataset.title),
      cardLines(app, stage.ranges),
    );
    sheet.toBlob((blob) => save(blob, fileName("png")));
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
  return `${name}-block${app.own.block(layer)}-head${head}-query${query}.${ending}`;
}

async function open() {
  listen();
  try {
    app.about = await source.about();
  } catch (error) {
    fail(error);
    return;
  }
  const { about } = app;
  setColours(about.colours);
  $("choices").hidden ||= !about.predicts && !about.labelled; // nothing to order by
  if (!about.labelled) {
    for (const part of document.querySelectorAll("#order [value=wrong], #wrong-sign")) part.remove();
  }
  $("about").title = about.title;
  $("student").append(...about.students.map((name) => new Option(name, name)));
  if (!about.stored) $("student").remove(0); // "none"
  $("student-choice").hidden = !about.students.length;
  $("view").max = about.views - 1;
  $("views").textContent = `of 0 to ${about.views - 1}`;
  $("adds").hidden = !about.adds;
  $("explain").hidden = source.offline;
  $("address-leads").hidden = location.protocol === "about:"; // a notebook's frame
  Object.assign(DEFAULTS, about.start, { split: about.split });
  if (!about.stored) DEFAULTS.student = about.students[0] ?? "";
  readAddress();
  gallery.fillClasses();
  await watch();
  await load(false);
  document.documentElement.dataset.ready = "true";
}

open();
