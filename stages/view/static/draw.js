// Drawing: weights as light or as colours, over a photo.

import { make } from "./dom.js";

const MARK = "#ff2d6f";
const GAMMA = 0.7; // as in stages/look/picture.py
const SIDE = 480; // pixels of the largest spotlight
let colours = new Uint8Array(0); // 256 of red, green, blue and opacity (stages/look/colours.py)
const painted = new Map(); // tables of colours by how much they hide

export function setColours(hex) {
  colours = Uint8Array.from(hex.match(/../g), (pair) => parseInt(pair, 16));
}

/** Weights as shares of a range, from 0 at `low` to 1 at `top` and above. */
export function shares(weights, [low, top]) {
  const values = new Float32Array(weights.length);
  for (let i = 0; i < values.length; i++) {
    values[i] = Math.min(Math.max((weights[i] - low) / (top - low), 0), 1) || 0;
  }
  return values;
}

/** Of each of `size * times` places along an axis: the four values that it lies between, and their
 * weights. This is Pillow's bicubic kernel, Keys 1981 with a = -1/2. */
function bicubic(size, times) {
  const kernel = (x) => (x < 1 ? (1.5 * x - 2.5) * x * x + 1 : ((-0.5 * x + 2.5) * x - 4) * x + 2);
  const places = new Int32Array(4 * size * times);
  const weights = new Float32Array(places.length); // 0 beyond the edge
  for (let i = 0; i < size * times; i++) {
    const centre = (i + 0.5) / times - 0.5;
    let sum = 0;
    for (let tap = 0; tap < 4; tap++) {
      const place = Math.floor(centre) + tap - 1;
      if (place < 0 || place >= size) continue;
      places[4 * i + tap] = place;
      weights[4 * i + tap] = kernel(Math.abs(place - centre));
      sum += weights[4 * i + tap];
    }
    for (let tap = 0; tap < 4; tap++) weights[4 * i + tap] /= sum;
  }
  return { places, weights };
}

/** Lines of `size` values, enlarged along them; the result has the lines as columns. */
function enlargedLines(values, size, times) {
  const { places, weights } = bicubic(size, times);
  const lines = values.length / size;
  const result = new Float32Array(values.length * times);
  for (let i = 0; i < size * times; i++) {
    for (let line = 0; line < lines; line++) {
      let sum = 0;
      for (let tap = 4 * i; tap < 4 * i + 4; tap++) sum += weights[tap] * values[line * size + places[tap]];
      result[i * lines + line] = sum;
    }
  }
  return result;
}

/** Values of a grid of h x w, enlarged bicubically; what leaves 0 to 1 is cut. */
export function enlarged(values, [h, w], times) {
  const columns = enlargedLines(values, w, times);
  return enlargedLines(columns, h, times).map((value) => Math.min(Math.max(value, 0), 1));
}

/** The pixels of 256 shares, from what says of each its red, green, blue and opacity. */
const tableOf = (pixel) =>
  new Uint32Array(Uint8ClampedArray.from(Array.from({ length: 256 }, (_, i) => pixel(i)).flat()).buffer);

/** Paints shares [h * w] into a canvas of h x w pixels; `table` has the pixels of 256 shares. */
function fill(canvas, values, [h, w], table) {
  Object.assign(canvas, { width: w, height: h });
  const pixels = new ImageData(w, h);
  const words = new Uint32Array(pixels.data.buffer);
  for (let i = 0; i < words.length; i++) words[i] = table[Math.round(255 * values[i])];
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}

/** Paints shares as colours. At an `overlay` of a half the colours are as opaque as they are, at 1
 * nothing shines through, at 0 nothing is seen. */
export function paint(canvas, values, grid, overlay = 1) {
  if (!painted.has(overlay)) {
    const opacity = (opaque) => (overlay < 0.5 ? opaque * 2 * overlay : opaque + (255 - opaque) * (2 * overlay - 1));
    painted.set(
      overlay,
      tableOf((i) => [...colours.subarray(4 * i, 4 * i + 3), opacity(colours[4 * i + 3])]),
    );
  }
  fill(canvas, values, grid, painted.get(overlay));
}

/** The bar of a legend: colours, or from grey and dark to clear. */
export function paintBar(canvas, style) {
  const values = Float32Array.from({ length: 256 }, (_, i) => i / 255);
  if (style !== "spotlight") paint(canvas, values, [1, 256], 1);
  else
    fill(
      canvas,
      values,
      [1, 256],
      tableOf((i) => [40 + i * 0.84, 40 + i * 0.84, 40 + i * 0.84, 255]),
    );
}

/** A map's values on a finer grid, and that grid. */
function fine(values, [h, w]) {
  const times = Math.ceil(128 / Math.max(h, w));
  return [enlarged(values, [h, w], times), [h * times, w * times]];
}

const cut = new WeakMap(); // of each picture: the part that the model sees, as a canvas

function partOf(picture, [left, top, right, bottom]) {
  if (!cut.has(picture)) {
    const [width, height] = [picture.naturalWidth, picture.naturalHeight];
    const [across, down] = [(right - left) * width, (bottom - top) * height];
    const scale = Math.min(SIDE / Math.max(across, down), 1);
    const part = make("canvas", { width: Math.round(scale * across), height: Math.round(scale * down) });
    part.getContext("2d").drawImage(picture, left * width, top * height, across, down, 0, 0, part.width, part.height);
    cut.set(picture, part);
  }
  return cut.get(picture);
}

const mask = make("canvas");
const clear = tableOf((i) => [0, 0, 0, 255 * (i / 255) ** GAMMA]);

/** Draws the part of a picture that the model sees, as clear as the map is high. */
function light(canvas, values, grid, picture, crop) {
  const part = partOf(picture, crop);
  const [finer, size] = fine(values, grid);
  fill(mask, finer, size, clear);
  Object.assign(canvas, { width: part.width, height: part.height });
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = true;
  context.drawImage(mask, 0, 0, part.width, part.height);
  context.globalCompositeOperation = "source-in";
  context.drawImage(part, 0, 0);
}

/** A photo, a canvas for its map over the part that the model sees, and marks over that. */
export function makePane() {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const canvas = make("canvas", { tabIndex: 0, role: "img" });
  const photo = make("div", { className: "photo" }, make("img", { alt: "" }), canvas, svg);
  return make("figure", {}, make("div", { className: "frame" }, photo), make("figcaption", {}));
}

/** Shows a map in a pane: `seen` has the picture (or null), its `crop`, the weights on their grid,
 * their range, the style, the patches that a test has hidden, and the query and Gaussian that are marked. Without a picture there is
 * nothing to throw light on, and the map is painted alone. */
export function drawPane(pane, { picture, crop, weights, grid, range, opacity, style, query, gaussian, hidden }) {
  const [h, w] = grid;
  const [image, canvas, svg] = pane.querySelector(".photo").children;
  const [left, top, right, bottom] = picture ? crop : [0, 0, 1, 1];
  const aspect = picture ? picture.naturalWidth / picture.naturalHeight : w / h;
  pane.style.setProperty("--aspect", aspect);
  pane.style.setProperty("--across", right - left);
  pane.style.setProperty("--down", bottom - top);
  image.hidden = !picture;
  if (picture && image.src !== picture.src) image.src = picture.src;
  image.classList.toggle("tiny", picture?.naturalWidth < 24);

  const values = shares(weights, range);
  const lit = picture && style === "spotlight";
  pane.dataset.brightness = lit ? 0.7 * (1 - opacity) : ""; // of the grey photo round the light
  image.style.filter = lit ? `grayscale(1) brightness(${pane.dataset.brightness})` : "";
  if (lit) light(canvas, values, grid, picture, crop);
  else if (style === "heat") paint(canvas, ...fine(values, grid), picture ? opacity : 1);
  else paint(canvas, values, grid, picture ? opacity : 1);
  canvas.classList.toggle("smooth", lit || style === "heat");

  for (const part of [canvas, svg]) {
    const box = { left, top, width: right - left, height: bottom - top };
    for (const [side, share] of Object.entries(box)) part.style[side] = `${100 * share}%`;
  }
  svg.setAttribute("viewBox", `0 0 ${w} ${h}`);
  svg.setAttribute("preserveAspectRatio", "none");
  const grey = hidden.map((patch) => `<path d="M${patch % w} ${Math.floor(patch / w)}h1v1h-1z" fill="#7c7770"/>`);
  svg.innerHTML = grey.join("") + marks(query, gaussian, grid);
}

/** The patch of a query; a Gaussian's centre and the ellipse of one standard deviation, in patches. */
function marks(query, gaussian, [h, w]) {
  const shapes = [];
  if (typeof query === "number") {
    const corner = `x="${(query % w) + 0.04}" y="${Math.floor(query / w) + 0.04}"`;
    shapes.push([`rect ${corner} width="0.92" height="0.92"`, MARK]);
  }
  if (gaussian) {
    const [x, y] = [w, h].map((size, axis) => ((gaussian[axis] + 1) / 2) * (size - 1) + 0.5);
    const [rx, ry] = [w, h].map((size, axis) => Math.max((gaussian[axis + 2] / 2) * (size - 1), 0.05));
    shapes.push([`ellipse cx="${x}" cy="${y}" rx="${rx}" ry="${ry}"`, "#fff"]);
    shapes.push([`path d="M${x - 0.2} ${y}h.4M${x} ${y - 0.2}v.4"`, "#fff"]);
  }
  const outlined = ([shape, colour]) =>
    [
      ["#000a", 5],
      ["#fff", 4],
      [colour, 2.5],
    ].map(
      ([stroke, width]) =>
        `<${shape} fill="none" vector-effect="non-scaling-stroke" stroke="${stroke}" stroke-width="${width}"/>`,
    );
  return shapes.flatMap(outlined).join("");
}
