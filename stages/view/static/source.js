// Where numbers come from: the server, or the page itself (gaupipe view --html).

import { decoded, unpack } from "./wire.js";

/** Parts of a state, as a server reads them. */
const asked = (state, ...names) => new URLSearchParams(names.map((name) => [name, state[name]]));

class Server {
  offline = false;

  async ask(path, options) {
    let answer;
    try {
      answer = await fetch(path, options);
    } catch {
      throw Object.assign(new Error("The server does not answer."), { unreachable: true });
    }
    if (answer.ok) return answer;
    const { error } = await answer.json().catch(() => ({ error: `${path}: ${answer.status}` }));
    throw new Error(error);
  }

  async json(path) {
    return (await this.ask(path)).json();
  }

  async message(path) {
    return unpack(await (await this.ask(path)).arrayBuffer());
  }

  async about() {
    const about = await this.json("api/about");
    this.token = about.token;
    return about;
  }

  status(state) {
    return this.json(`api/status?${asked(state, "split", "student")}`);
  }

  gallery(state) {
    return this.json(`api/gallery?${asked(state, "split", "student", "order", "class", "page")}`);
  }

  image(state) {
    return this.message(`api/image/${state.image}?${asked(state, "view", "split", "student")}`);
  }

  relevance(state) {
    const label = state.explain < 0 ? "" : state.explain;
    const what = asked(state, "view", "split", "student");
    return this.message(`api/relevance/${state.image}?class=${label}&${what}`);
  }

  pixels({ image, view, split }, side = 1600) {
    return `api/pixels/${this.token}/${image}?${asked({ view, split, side }, "view", "split", "side")}`;
  }

  /** The number of an image that is added: a file, or the name or path of one. */
  async add(name, file) {
    const options = { method: "POST", headers: { "X-Token": this.token }, body: file };
    const answer = await this.ask(`api/images?${new URLSearchParams({ name })}`, options);
    return (await answer.json()).image;
  }
}

/** What is under a name or, without one, first. */
const named = (all, name) => all[name] ?? Object.values(all)[0];

class Embedded {
  offline = true;

  constructor(page) {
    this.page = page;
  }

  async about() {
    return this.page.about;
  }

  async status() {
    return this.page.status;
  }

  /** The images that the page has. */
  async gallery({ student }) {
    const ids = Object.keys(this.page.images).map(Number);
    const items = await Promise.all(
      ids.map(async (id) => {
        const { header } = await this.image({ image: id, view: 0, student });
        const { label, predicted, probability, title } = header;
        return { id, label, predicted, probability, title };
      }),
    );
    return { items, total: items.length, page: 0, size: items.length };
  }

  found(image) {
    const found = this.page.images[image];
    if (found) return found;
    const ids = Object.keys(this.page.images).join(", ");
    throw new Error(`This page has only the images ${ids}, not image ${image}.`);
  }

  async image({ image, view, student }) {
    return unpack(decoded(named(this.found(image).maps, student)[view]));
  }

  async relevance({ image, view, student }) {
    return unpack(decoded(named(this.found(image).relevance, student)[view]));
  }

  pixels({ image, view }) {
    return this.found(image).pixels[view];
  }
}

export function openSource() {
  const embedded = document.getElementById("embedded");
  return embedded ? new Embedded(JSON.parse(embedded.textContent)) : new Server();
}
