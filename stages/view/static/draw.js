// Drawing: colours, heat maps, and the photo with its map.

let colours = new Uint8Array(0); // 256 of red, green, blue and opacity (stages/look/picture.py)

export function setColours(hex) {
  colours = Uint8Array.from(hex.match(/../g), (pair) => parseInt(pair, 16));
}

/** Paints weights [h * w] into a canvas of h x w pixels, from `low` to `top`. At an `overlay` of a
 * half the colours are as opaque as they are, at 1 nothing shines through, at 0 nothing is seen. */
export function paint(canvas, weights, [h, w], [low, top], overlay = 1) {
  if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(w, h);
  for (let i = 0; i < h * w; i++) {
    const share = Math.min(Math.max((weights[i] - low) / (top - low), 0), 1) || 0;
    const at = 4 * Math.round(255 * share);
    const opaque = colours[at + 3];
    const more = overlay < 0.5 ? opaque * 2 * overlay : opaque + (255 - opaque) * (2 * overlay - 1);
    pixels.data.set([colours[at], colours[at + 1], colours[at + 2], more], 4 * i);
  }
  context.putImageData(pixels, 0, 0);
}

export function paintBar(canvas) {
  paint(canvas, Float32Array.from({ length: 256 }, (_, i) => i), [1, 256], [0, 255]);
}

/** Height by width of what is drawn: of the photo or, without one, of the grid. */
export function aspect({ picture, grid }) {
  return picture ? picture.naturalHeight / picture.naturalWidth : grid[0] / grid[1];
}

/** Left, top, width and height of the part that the model sees, in a picture of that size. */
export function seenPart({ picture, crop }, [width, height]) {
  const [left, top, right, bottom] = picture ? crop : [0, 0, 1, 1];
  return [left * width, top * height, (right - left) * width, (bottom - top) * height];
}

/** Draws a photo with its map: `seen` has picture (or null), crop, weights, grid, range, opacity,
 * query and gaussian. */
export function drawPicture(context, size, seen) {
  const [h, w] = seen.grid;
  const [width, height] = size;
  const part = seenPart(seen, size);
  context.clearRect(0, 0, width, height);
  if (seen.picture) {
    context.imageSmoothingEnabled = seen.picture.naturalWidth >= 24;
    context.imageSmoothingQuality = "high";
    context.drawImage(seen.picture, 0, 0, width, height);
  } else {
    context.fillStyle = "#8884";
    context.fillRect(0, 0, width, height);
  }
  const heat = document.createElement("canvas");
  paint(heat, seen.weights, seen.grid, seen.range, seen.picture ? seen.opacity : 1);
  context.save();
  context.beginPath();
  context.rect(...part);
  context.clip();
  context.imageSmoothingEnabled = Boolean(seen.smooth);
  context.drawImage(heat, ...part);
  context.translate(part[0], part[1]);
  const cell = [part[2] / w, part[3] / h];
  if (seen.gaussian) ellipse(context, seen.gaussian, seen.grid, cell);
  const line = Math.max(2, width / 200);
  if (typeof seen.query === "number") {
    const x = (seen.query % w) * cell[0];
    const y = Math.floor(seen.query / w) * cell[1];
    const inset = line / 2 + 1; // whole at the border too
    outlined(context, line, "#ff2d6f", () => {
      context.rect(x + inset, y + inset, cell[0] - 2 * inset, cell[1] - 2 * inset);
    });
  }
  context.restore();
  if (part[2] < width - 1 || part[3] < height - 1) dimOutside(context, size, part);
}

/** Makes paler what the model does not see, and draws a line round the rest. */
function dimOutside(context, [width, height], part) {
  context.save();
  context.fillStyle = "#70788088";
  context.beginPath();
  context.rect(0, 0, width, height);
  context.rect(...part);
  context.fill("evenodd");
  context.restore();
  outlined(context, 1, "#fff", () => context.rect(...part));
}

function outlined(context, line, inner, shape) {
  for (const [style, wide] of [["#000a", line + 2], ["#fff", line + 1], [inner, line]]) {
    context.beginPath();
    shape();
    context.strokeStyle = style;
    context.lineWidth = wide;
    context.stroke();
  }
}

/** A Gaussian's centre, and the ellipse of one standard deviation. */
function ellipse(context, [meanX, meanY, stdX, stdY], [h, w], cell) {
  const position = (s, n, size) => (((s + 1) / 2) * (n - 1) + 0.5) * size;
  const radius = (s, n, size) => Math.max(((s * (n - 1)) / 2) * size, 1);
  const x = position(meanX, w, cell[0]);
  const y = position(meanY, h, cell[1]);
  outlined(context, 1.5, "#fff", () => {
    context.ellipse(x, y, radius(stdX, w, cell[0]), radius(stdY, h, cell[1]), 0, 0, 2 * Math.PI);
    context.moveTo(x - 5, y);
    context.lineTo(x + 5, y);
    context.moveTo(x, y - 5);
    context.lineTo(x, y + 5);
  });
}

/** A picture of what is shown, for a file: panes side by side with their names, the colour bar and a
 * text. */
export function composed(panes, text) {
  const side = 480;
  const gap = 24;
  const height = Math.round(side * aspect(panes[0]));
  const canvas = document.createElement("canvas");
  canvas.width = panes.length * (side + gap) + gap;
  const context = canvas.getContext("2d");
  context.font = CAPTION;
  const lines = wrapped(context, text, canvas.width - 2 * gap);
  canvas.height = height + 90 + 20 * lines.length;
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  panes.forEach((pane, place) => {
    context.save();
    context.translate(gap + place * (side + gap), 40);
    drawPicture(context, [side, height], pane);
    context.restore();
    context.fillStyle = "#16191d";
    context.font = "600 16px system-ui, sans-serif";
    context.fillText(pane.name, gap + place * (side + gap), 27);
  });
  const bar = document.createElement("canvas");
  paintBar(bar);
  context.drawImage(bar, gap, height + 56, 200, 10);
  context.font = CAPTION;
  const [low, top] = panes[0].range.map((weight) => weight.toPrecision(3));
  context.fillText(`${low} to ${top}`, gap + 212, height + 66);
  lines.forEach((line, place) => context.fillText(line, gap, height + 96 + 20 * place));
  return canvas;
}

const CAPTION = "14px system-ui, sans-serif";

/** A text in lines that are at most so wide. */
function wrapped(context, text, width) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = `${lines.at(-1)} ${word}`.trim();
    if (context.measureText(longer).width > width) lines.push(word);
    else lines[lines.length - 1] = longer;
  }
  return lines;
}
