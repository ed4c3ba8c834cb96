// Drawing: weights as colours, and a map over its photo.

import { make } from "./dom.js";

const MARK = "#ff2d6f";
let colours = new Uint8Array(0); // 256 of red, green, blue and opacity (stages/look/colours.py)

export function setColours(hex) {
  colours = Uint8Array.from(hex.match(/../g), (pair) => parseInt(pair, 16));
}

/** Paints weights [h * w] into a canvas of h x w pixels, from `low` to `top`. At an `overlay` of a
 * half the colours are as opaque as they are, at 1 nothing shines through, at 0 nothing is seen. */
export function paint(canvas, weights, [h, w], [low, top], overlay = 1) {
  Object.assign(canvas, { width: w, height: h });
  const pixels = new ImageData(w, h);
  weights.forEach((weight, i) => {
    const share = Math.min(Math.max((weight - low) / (top - low), 0), 1) || 0;
    const at = 4 * Math.round(255 * share);
    const opaque = colours[at + 3];
    const more = overlay < 0.5 ? opaque * 2 * overlay : opaque + (255 - opaque) * (2 * overlay - 1);
    pixels.data.set([colours[at], colours[at + 1], colours[at + 2], more], 4 * i);
  });
  canvas.getContext("2d").putImageData(pixels, 0, 0);
}

/** A photo, a canvas for its map over the part that the model sees, and marks over that. */
export function makePane() {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const canvas = make("canvas", { tabIndex: 0, role: "img" });
  const photo = make("div", { className: "photo" }, make("img", { alt: "" }), canvas, svg);
  return make("figure", {}, photo, make("figcaption", {}));
}

/** Shows a map in a pane: `seen` has the picture (or null), its `crop`, the weights on their grid,
 * their range, and the query and Gaussian that are marked. */
export function drawPane(pane, { picture, crop, weights, grid, range, opacity, smooth, query, gaussian }) {
  const [h, w] = grid;
  const [image, canvas, svg] = pane.firstChild.children;
  const [left, top, right, bottom] = picture ? crop : [0, 0, 1, 1];
  const aspect = picture ? picture.naturalWidth / picture.naturalHeight : w / h;
  pane.style.setProperty("--aspect", aspect);
  image.hidden = !picture;
  if (picture && image.src !== picture.src) image.src = picture.src;
  image.classList.toggle("tiny", picture?.naturalWidth < 24);
  paint(canvas, weights, grid, range, picture ? opacity : 1);
  canvas.classList.toggle("smooth", smooth);
  for (const part of [canvas, svg]) {
    const box = { left, top, width: right - left, height: bottom - top };
    for (const [side, share] of Object.entries(box)) part.style[side] = `${100 * share}%`;
  }
  svg.setAttribute("viewBox", `0 0 ${w} ${h}`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.innerHTML = marks(query, gaussian, grid);
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
    [["#000a", 5], ["#fff", 4], [colour, 2.5]].map(
      ([stroke, width]) =>
        `<${shape} fill="none" vector-effect="non-scaling-stroke" stroke="${stroke}" stroke-width="${width}"/>`,
    );
  return shapes.flatMap(outlined).join("");
}

/** What panes show, side by side over their names, as a picture for a file. */
export async function composed(panes) {
  const side = 640;
  const scale = side / panes[0].firstChild.clientWidth;
  const height = Math.round(scale * panes[0].firstChild.clientHeight);
  const sheet = make("canvas", { width: side * panes.length, height: height + 32 });
  const context = sheet.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, sheet.width, sheet.height);
  context.font = "18px system-ui, sans-serif";
  context.fillStyle = "#000";
  for (const pane of panes) {
    const [image, canvas, svg] = pane.firstChild.children;
    const [x, y, width, high] = ["Left", "Top", "Width", "Height"].map((of) => scale * canvas[`offset${of}`]);
    const copy = svg.cloneNode(true);
    copy.setAttribute("width", width);
    copy.setAttribute("height", high);
    const marks = new Image();
    marks.src = `data:image/svg+xml,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
    await marks.decode();
    context.imageSmoothingEnabled = !image.classList.contains("tiny");
    if (!image.hidden) context.drawImage(image, 0, 0, side, height);
    context.imageSmoothingEnabled = canvas.classList.contains("smooth");
    for (const layer of [canvas, marks]) context.drawImage(layer, x, y, width, high);
    context.fillText(pane.dataset.name, 4, height + 23);
    context.translate(side, 0);
  }
  return sheet;
}
