// The gallery: a page of images in an order.

import { $, count, make, percent } from "./dom.js";

/** Scrolls a list as far as one of its buttons needs. scrollIntoView would let Tab begin there. */
function show(button, list) {
  const inner = button.getBoundingClientRect();
  const outer = list.getBoundingClientRect();
  const across = Math.min(inner.left - outer.left, 0) || Math.max(inner.right - outer.right, 0);
  const down = Math.min(inner.top - outer.top, 0) || Math.max(inner.bottom - outer.bottom, 0);
  list.scrollBy(across, down);
}

export class Gallery {
  items = [];
  total = 0;
  size = 60;
  page = 0;

  constructor(source, app) {
    Object.assign(this, { source, app });
    $("page-back").addEventListener("click", () => this.turn(-1));
    $("page-on").addEventListener("click", () => this.turn(1));
    $("image-back").addEventListener("click", () => this.next(-1));
    $("image-on").addEventListener("click", () => this.next(1));
    $("go").addEventListener("submit", (event) => {
      event.preventDefault();
      const asked = $("go-to").value.trim();
      $("go-to").value = "";
      if (/^\d+$/.test(asked)) app.set({ image: Number(asked), view: 0 });
      else if (asked) app.add(asked);
    });
    $("class").addEventListener("change", () => {
      const asked = $("class").value.trim().toLowerCase();
      const names = Array.from({ length: app.about.classes }, (_, label) => app.className(label).toLowerCase());
      const exact = names.indexOf(asked);
      const label = exact < 0 ? names.findIndex((name) => name.includes(asked)) : exact;
      app.set({ class: asked && label >= 0 ? label : "", page: 0 });
      this.nameClass();
    });
    $("choices").hidden = $("go").hidden = source.offline;
    document.body.classList.toggle("offline", source.offline);
  }

  fillClasses() {
    const { about, className } = this.app;
    const options = Array.from({ length: about.classes }, (_, label) => new Option(className(label)));
    $("class-names").replaceChildren(...options);
    this.nameClass();
  }

  /** Writes the class whose images are listed. */
  nameClass() {
    const { state, className } = this.app;
    $("class").value = state.class === "" ? "" : className(state.class);
  }

  /** Shows the page that has the image or, in another order than by number, the page of the state. */
  async follow() {
    const { state } = this.app;
    const byNumber = state.order === "id" && state.class === "" && !this.source.offline;
    if (byNumber) state.page = Math.floor(state.image / this.size);
    if (this.wanted !== this.asked) await this.load();
  }

  /** What is asked for, as one text. */
  get wanted() {
    const { split, student, order, class: label, page } = this.app.state;
    return [split, student, order, label, page].join("/");
  }

  async load() {
    const asked = this.wanted;
    this.asked = asked;
    let found;
    try {
      found = await this.source.gallery(this.app.state);
    } catch (error) {
      $("thumbs").replaceChildren(make("p", { className: "note" }, error.message));
      return;
    }
    if (this.asked !== asked) return;
    this.waits = found.items === null;
    Object.assign(this, found, { items: found.items ?? [] });
    this.render();
    const behind = this.app.about.predicts && this.items.some(({ predicted }) => predicted == null);
    if (this.waits || behind) this.app.watch();
    if (this.waits) return;
    if (this.opens && this.items.length) await this.open(this.items[0]);
  }

  async open({ id }) {
    this.opens = false;
    await this.app.set({ image: id, view: 0 });
  }

  /** How far labels and predictions have been read. */
  progress({ done, total, reading, error }) {
    const ended = !reading && !error && (this.reading || this.waits);
    const more = reading && !this.waits && done - (this.done ?? 0) >= this.size;
    if (more || ended) this.done = done;
    this.reading = reading;
    $("reading").hidden = !reading && !error;
    $("reading-bar").hidden = Boolean(error);
    $("reading-bar").value = total ? done / total : 0;
    $("reading-text").textContent = error || `Reading predictions: ${count(done)} of ${count(total)}`;
    if (ended || more) this.load(); // with predictions that have come in
  }

  render() {
    const { state } = this.app;
    const there = [...$("thumbs").children];
    const same =
      there.length === this.items.length && this.items.every(({ id }, i) => there[i].dataset.image === String(id));
    const thumbs = this.items.map((item, i) => this.thumb(item, same ? there[i] : null));
    if (!same) $("thumbs").replaceChildren(...thumbs);
    const isWrong = ({ label, predicted }) => label != null && label !== predicted;
    $("none-wrong").hidden = state.order !== "wrong" || this.page > 0 || !this.items.length || isWrong(this.items[0]);
    const isKnown = this.asked && !this.waits;
    if (!thumbs.length) $("thumbs").textContent = isKnown ? "No images here." : "";
    this.mark(this.app.state.image);
    const first = this.page * this.size;
    const shown = `${count(first + 1)}–${count(first + thumbs.length)} of ${count(this.total)}`;
    $("page-text").textContent = this.total ? shown : "";
    $("pager").hidden = this.total <= this.size;
    $("page-back").disabled = this.page === 0;
    $("page-on").disabled = first + this.size >= this.total;
    $("gallery").hidden = this.source.offline && this.total === 1;
  }

  /** A button for an image; where there is one already, what is known by now is written on it. */
  thumb({ id, title, label, predicted, probability }, there) {
    const { state, className, pixelsReady } = this.app;
    const known = [title ?? `Image ${id}`];
    if (label != null) known.push(className(label));
    if (predicted != null) known.push(`predicted ${className(predicted)}, ${percent(probability)}`);
    const button = there ?? make("button", { className: "thumb", data: { image: id, view: 0 } }, make("span"));
    button.classList.toggle("wrong", label != null && predicted != null && label !== predicted);
    button.ariaLabel = known.join(", ");
    button.title = known.join("\n");
    if (pixelsReady && !button.querySelector("img")) {
      const picture = make("img", { alt: "", loading: "lazy" });
      picture.src = this.source.pixels({ image: id, view: 0, split: state.split }, 160);
      picture.onload = () => picture.classList.toggle("tiny", picture.naturalWidth < 24);
      button.prepend(picture);
    }
    button.lastChild.textContent = predicted == null ? (title?.replace(/\.\w+$/, "") ?? id) : className(predicted);
    return button;
  }

  mark(image) {
    for (const button of $("thumbs").children) {
      const chosen = button.dataset.image === String(image);
      button.ariaCurrent = chosen ? "true" : null;
      if (chosen) show(button, $("thumbs"));
    }
  }

  async turn(step) {
    const pages = Math.max(Math.ceil(this.total / this.size), 1);
    const page = Math.min(Math.max(this.page + step, 0), pages - 1);
    if (page === this.page) return false;
    await this.app.set({ page });
    $("thumbs").scrollTop = 0;
    return true;
  }

  /** The image that is so many steps further in the order, if it is on this page. */
  beside(step) {
    const place = this.items.findIndex((item) => item.id === this.app.state.image);
    return place < 0 ? this.items[0] : this.items[place + step];
  }

  /** Opens the next image in the order (or with -1 the previous), also of another page. */
  async next(step) {
    let found = this.beside(step);
    if (!found && (await this.turn(step))) found = this.items.at(step > 0 ? 0 : -1);
    if (found) await this.open(found);
  }
}
