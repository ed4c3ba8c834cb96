// Kept snapshots: what each key gets on average, block by block, after every epoch of training.

import { $, largest } from "./dom.js";
import { paint } from "./draw.js";

export class Epochs {
  constructor(source, app) {
    Object.assign(this, { source, app });
    $("epoch").addEventListener("input", () => app.set({ epoch: Number($("epoch").value) }));
  }

  /** Loads the snapshots of an image, of the student that is shown or else of the teacher. */
  async load() {
    const { about, state } = this.app;
    this.who = state.student || "teacher";
    this.message = null;
    this.found = state.split === "train" ? about.snapshots[this.who] : null;
    if (this.found?.images.includes(state.image)) {
      try {
        this.message = await this.source.epochs(this.who, state.image);
      } catch (error) {
        this.failed = error.message;
      }
    }
    this.render();
  }

  render() {
    $("epochs-card").hidden = !this.app.about.run || (this.source.offline && !this.message);
    if ($("epochs-card").hidden) return;
    const there = this.message !== null;
    for (const id of ["epoch", "epoch-maps", "epoch-text"]) $(id).hidden = !there;
    if (!this.found) {
      $("epoch-note").textContent = Object.keys(this.app.about.snapshots).length
        ? `No snapshots of the ${this.name()} and these images were kept.`
        : "The setting key_snapshots (such as --set key_snapshots=12) makes a run keep what is " +
          "needed to show here how attention changes from epoch to epoch.";
      return;
    }
    if (!there) {
      const links = this.found.images.slice(0, 12).map((image) => {
        const button = document.createElement("button");
        button.textContent = image;
        button.className = "plain";
        button.addEventListener("click", () => this.app.choose(image));
        return button;
      });
      $("epoch-note").replaceChildren(`Snapshots of the ${this.name()} were kept of the images `, ...links);
      return;
    }
    const { shape, values } = this.message.arrays.attention;
    const [count, layers, tokens] = shape;
    const chosen = this.app.state.epoch;
    const place = chosen < 0 ? count - 1 : Math.min(chosen, count - 1);
    $("epoch").max = count - 1;
    $("epoch").value = place;
    const number = this.message.header.epochs[place];
    $("epoch-text").textContent = `${this.name()}, epoch ${number} of ${this.message.header.epochs.at(-1)}`;
    $("epoch").setAttribute("aria-valuetext", `epoch ${number}`);
    const { grid } = this.app.maps;
    const side = Math.round(Math.sqrt(tokens));
    const shown = grid[0] * grid[1] === tokens ? grid : [side, tokens / side];
    const maps = [];
    for (let layer = 0; layer < layers; layer++) {
      const start = (place * layers + layer) * tokens;
      const weights = values.subarray(start, start + tokens);
      const figure = document.createElement("figure");
      const canvas = document.createElement("canvas");
      paint(canvas, weights, shown, largest(weights));
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `Block ${layer} after epoch ${number}`);
      const caption = document.createElement("figcaption");
      caption.textContent = layer;
      figure.append(canvas, caption);
      maps.push(figure);
    }
    $("epoch-maps").replaceChildren(...maps);
    $("epoch-note").textContent = "What each key gets in each block, mean over heads and queries.";
  }

  name() {
    return this.who === "teacher" ? "teacher" : `student ${this.who}`;
  }
}
