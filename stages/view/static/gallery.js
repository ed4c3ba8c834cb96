// The gallery: a page of images in an order.

import { $, make, percent } from "./dom.js";

/** Scrolls a list as far as one of its buttons needs. scrollIntoView would let Tab begin there. */
function show(button, list) {
  const inner = button.getBoundingClientRect();
  const outer = list.getBoundingClientRect();
  const across = Math.min(inner.left - outer.left, 0) || Math.max(inner.right - outer.right, 0);
  const down = Math.min(inner.top - outer.top, 0) || Math.max(inner.bottom - outer.bottom, 0);
  list.scrollBy(across, down);
}

export class Gallery {
  /** `choose` is called with the id of an image, `changed` when order, class or page changed. */
  constructor(source, app) {
    Object.assign(this, { source, app, items: [], total: 0, size: 60, page: 0 });
    for (const name of ["order", "class"]) {
      $(name).addEventListener("change", () => {
        const value = $(name).value;
        app.set({ [name]: name === "class" && value !== "" ? Number(value) : value, page: 0 });
        this.opens = name === "order" && value !== "id"; // the first of them
        this.load();
      });
    }
    $("page-back").addEventListener("click", () => this.turn(-1));
    $("page-on").addEventListener("click", () => this.turn(1));
    $("go").addEventListener("submit", (event) => {
      event.preventDefault();
      const asked = $("go-to").value.trim();
      $("go-to").value = "";
      if (/^\d+$/.test(asked)) app.choose(Number(asked));
      else if (asked) app.add(asked);
    });
    for (const hidden of [".choices", "#go"]) {
      document.querySelector(`#gallery ${hidden}`).hidden = source.offline;
    }
    document.body.classList.toggle("offline", source.offline);
  }

  /** The first of the names of a class: ImageNet's have synonyms. */
  className(label) {
    return this.app.classNames[label]?.split(", ")[0] ?? `class ${label}`;
  }

  /** Shows the page of the image, with the predictions of the student that is chosen. */
  async follow() {
    const { state } = this.app;
    const byNumber = state.order === "id" && state.class === "" && !this.source.offline;
    if (byNumber) state.page = Math.floor(state.image / this.size);
    const { split, student, order, class: label, page } = state;
    const wanted = `${split}/${student}/${order}/${label}/${page}`;
    if (wanted === this.asked) return;
    await this.load();
  }

  fillClasses(count) {
    const options = Array.from({ length: count }, (_, label) => new Option(this.className(label), label));
    $("class").replaceChildren(new Option("all", ""), ...options);
    $("class").value = String(this.app.state.class);
  }

  async load() {
    const { state } = this.app;
    $("order").value = state.order;
    $("class").value = String(state.class);
    const { split, student, order, class: label, page } = state;
    const asked = `${split}/${student}/${order}/${label}/${page}`;
    this.asked = asked;
    let found;
    try {
      found = await this.source.gallery(state);
    } catch (error) {
      $("thumbs").replaceChildren(make("p", { className: "note" }, error.message));
      return;
    }
    if (this.asked !== asked) return;
    this.waits = found.items === null;
    Object.assign(this, found, { items: found.items ?? [] });
    this.render();
    $("gallery").hidden = this.source.offline && this.total === 1;
    if (this.waits) this.app.watch();
    else if (this.opens && this.items.length) {
      this.opens = false;
      await this.app.choose(this.items[0].id);
    }
  }

  /** How far labels and predictions have been read. */
  progress(labels) {
    const { reading, error } = labels;
    const ended = !reading && !error && (this.reading || this.waits);
    this.reading = reading;
    $("reading").hidden = !reading && !error;
    $("reading-bar").value = labels.total ? labels.done / labels.total : 0;
    const count = (number) => number.toLocaleString("en");
    $("reading-text").textContent =
      error || `Reading predictions: ${count(labels.done)} of ${count(labels.total)}`;
    if (ended) this.load();
  }

  render() {
    const { state, pixelsReady } = this.app;
    const thumbs = this.items.map((item) => {
      const button = make("button", { className: "thumb" });
      button.dataset.id = item.id;
      const known = [item.title ?? `Image ${item.id}`];
      if (item.label != null) known.push(this.className(item.label));
      if (item.predicted != null) {
        known.push(`predicted ${this.className(item.predicted)}, ${percent(item.probability)}`);
        button.classList.toggle("wrong", item.label != null && item.label !== item.predicted);
      }
      button.setAttribute("aria-label", known.join(", "));
      button.title = known.join("\n");
      if (pixelsReady) {
        const picture = make("img", { alt: "", loading: "lazy" });
        picture.src = this.source.pixels({ image: item.id, view: 0, split: state.split }, 160);
        picture.onload = () => picture.classList.toggle("tiny", picture.naturalWidth < 24);
        button.append(picture);
      }
      button.append(make("span", {}, item.title ?? String(item.id)));
      button.addEventListener("click", () => this.app.choose(item.id));
      return button;
    });
    $("thumbs").replaceChildren(...thumbs);
    if (!thumbs.length && !this.waits) {
      $("thumbs").textContent = "No images here.";
    }
    this.mark(state.image);
    const first = this.page * this.size;
    const count = (number) => number.toLocaleString("en");
    $("page-text").textContent = this.total
      ? `${count(first + 1)}–${count(first + this.items.length)} of ${count(this.total)}`
      : "";
    document.querySelector("#gallery .pager").hidden = this.total <= this.size;
    $("page-back").disabled = this.page === 0;
    $("page-on").disabled = first + this.size >= this.total;
  }

  mark(image) {
    for (const button of $("thumbs").children) {
      const chosen = Number(button.dataset.id) === image;
      if (chosen) {
        button.setAttribute("aria-current", "true");
        show(button, $("thumbs"));
      } else button.removeAttribute("aria-current");
    }
  }

  async turn(step) {
    const pages = Math.max(Math.ceil(this.total / this.size), 1);
    const page = Math.min(Math.max(this.page + step, 0), pages - 1);
    if (page === this.page) return false;
    this.app.set({ page });
    await this.load();
    $("thumbs").scrollTop = 0;
    return true;
  }

  /** The next image in the order (or with -1 the previous), on the next page where this one ends. */
  async next(step) {
    const place = this.items.findIndex((item) => item.id === this.app.state.image);
    let found = this.items[place + step];
    if (place < 0) found = this.items[0];
    else if (!found && (await this.turn(step))) found = this.items.at(step > 0 ? 0 : -1);
    if (found) await this.app.choose(found.id);
  }
}
