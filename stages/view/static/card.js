// A picture to send: what panes show, side by side, with what it is below.

import { make } from "./dom.js";

const WIDTH = 1600;
const HIGHEST = 900; // of the photos
const MARGIN = 32;
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";
const GROUND = "#14171c";

/** A photo in grey, as dark as round a spotlight. */
function dimmed(image, width, height, brightness) {
  const canvas = make("canvas", { width, height });
  const context = canvas.getContext("2d");
  context.drawImage(image, 0, 0, width, height);
  const pixels = context.getImageData(0, 0, width, height);
  for (let i = 0; i < pixels.data.length; i += 4) {
    const [red, green, blue] = pixels.data.subarray(i, i + 3);
    pixels.data.fill(brightness * (0.2126 * red + 0.7152 * green + 0.0722 * blue), i, i + 3);
  }
  context.putImageData(pixels, 0, 0);
  return canvas;
}

/** The marks of a pane as an image of a size. */
async function marksOf(svg, width, height) {
  const copy = svg.cloneNode(true);
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  const marks = new Image();
  marks.src = `data:image/svg+xml,${encodeURIComponent(new XMLSerializer().serializeToString(copy))}`;
  await marks.decode();
  return marks;
}

/** Draws the photo of a pane and its map into a box. */
async function drawPhoto(context, pane, [x, y, width, height]) {
  const [image, canvas, svg] = pane.querySelector(".photo").children;
  const [aspect, across, down] = ["aspect", "across", "down"].map((name) =>
    Number(pane.style.getPropertyValue(`--${name}`)),
  );
  const wide = Math.round(Math.min(width / across, (height * aspect) / down));
  const high = Math.round(wide / aspect);
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.translate(x + (width - wide) / 2, y + (height - high) / 2);
  context.imageSmoothingEnabled = !image.classList.contains("tiny");
  const { brightness } = pane.dataset;
  if (!image.hidden) context.drawImage(brightness ? dimmed(image, wide, high, brightness) : image, 0, 0, wide, high);
  context.imageSmoothingEnabled = canvas.classList.contains("smooth");
  const share = (side) => parseFloat(canvas.style[side]) / 100;
  const box = [share("left") * wide, share("top") * high, share("width") * wide, share("height") * high];
  context.drawImage(canvas, ...box);
  context.drawImage(await marksOf(svg, box[2], box[3]), ...box);
  context.restore();
}

/** Writes a text no wider than a width: smaller where it is long. */
function write(context, text, x, y, size, width, weight = 400) {
  context.font = `${weight} ${size}px ${FONT}`;
  const smaller = Math.min(1, width / context.measureText(text).width);
  context.font = `${weight} ${Math.floor(size * smaller)}px ${FONT}`;
  context.fillText(text, x, y);
}

/** A picture 1,600 pixels wide of what panes show: below each its `title`, below all `lines`. */
export async function card(panes, titles, lines) {
  const width = WIDTH / panes.length;
  const height = Math.min(HIGHEST, width);
  const sheet = make("canvas", { width: WIDTH, height: height + 108 + 40 * lines.length });
  const context = sheet.getContext("2d");
  context.fillStyle = GROUND;
  context.fillRect(0, 0, sheet.width, sheet.height);
  for (const [place, pane] of panes.entries()) {
    await drawPhoto(context, pane, [place * width, 0, width, height]);
    context.fillStyle = "#fff";
    write(context, titles[place], place * width + MARGIN, height + 64, 46, width - 2 * MARGIN, 650);
  }
  context.fillStyle = "#b8c0cc";
  for (const [place, line] of lines.entries()) {
    write(context, line, MARGIN, height + 112 + 40 * place, 28, WIDTH - 2 * MARGIN);
  }
  return sheet;
}
