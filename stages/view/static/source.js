// Where numbers come from: the server, or the page itself (gaupipe view --html).

import { decoded, unpack } from "./wire.js";

class Server {
  offline = false;

  async ask(path) {
    let answer;
    try {
      answer = await fetch(path);
    } catch {
      throw new Error("The server does not answer. Is gaupipe view still running?");
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

  status() {
    return this.json("api/status");
  }

  gallery(order, label, page) {
    return this.json(`api/gallery?order=${order}&class=${label}&page=${page}`);
  }

  image(image, view) {
    return this.message(`api/image/${image}?view=${view}`);
  }

  student(name, image, view) {
    return this.message(`api/student/${encodeURIComponent(name)}/${image}?view=${view}`);
  }

  epochs(who, image) {
    return this.message(`api/epochs/${encodeURIComponent(who)}/${image}`);
  }

  pixels(image, view) {
    return `api/pixels/${this.token}/${image}.png?view=${view}`;
  }
}

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
  async gallery() {
    const ids = Object.keys(this.page.images).map(Number);
    const items = ids.map((id) => {
      const { label, predicted, probability, title } = unpack(decoded(this.found(id).views[0])).header;
      return { id, label, predicted, probability, title };
    });
    return { items, total: items.length, page: 0, size: items.length };
  }

  found(image) {
    const found = this.page.images[image];
    if (found) return found;
    const ids = Object.keys(this.page.images).join(", ");
    throw new Error(`This page has only the images ${ids}, not image ${image}.`);
  }

  async image(image, view) {
    return unpack(decoded(this.found(image).views[view]));
  }

  async student(name, image, view) {
    return unpack(decoded(this.found(image).students[name][view]));
  }

  async epochs(who, image) {
    return unpack(decoded(this.found(image).epochs[who]));
  }

  pixels(image, view) {
    return `data:image/png;base64,${this.found(image).pixels[view]}`;
  }
}

export function openSource() {
  const embedded = document.getElementById("embedded");
  return embedded ? new Embedded(JSON.parse(embedded.textContent)) : new Server();
}
