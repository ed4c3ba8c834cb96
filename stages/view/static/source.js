// Where numbers come from: the server, or the page itself (gaupipe view --html).

const LEVELS = 63; // as in stages/view/messages.py
const TYPES = { float16: globalThis.Float16Array, float32: Float32Array, uint8: Uint8Array };

/** {header, arrays} of a message (pack in stages/view/viewer.py): each array has `values`, flat, and
 * `shape`. */
export function unpack(buffer) {
  let at = 4 + new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(buffer.slice(4, at)));
  const arrays = {};
  for (const [name, [dtype, shape, bytes]] of Object.entries(header.arrays)) {
    arrays[name] = { shape, values: new TYPES[dtype](buffer.slice(at, at + bytes)) };
    at += bytes;
  }
  for (const [name, { shape, values }] of Object.entries(arrays)) {
    const most = arrays[`${name}.most`]?.values; // of each row; the values are levels of the roots of shares
    const row = shape.at(-1);
    if (most)
      arrays[name].values = Float32Array.from(values, (level, i) => (level / LEVELS) ** 2 * most[Math.floor(i / row)]);
  }
  return { header, arrays };
}

/** The content of a message that a page holds. */
async function inflated(text) {
  const stream = new Blob([Uint8Array.fromBase64(text)]).stream();
  return new Response(stream.pipeThrough(new DecompressionStream("deflate"))).arrayBuffer();
}

/** Parts of a state, as a server reads them. */
const asked = (state, ...names) => new URLSearchParams(names.map((name) => [name, state[name]]));

class Server {
  offline = false;
  /** Promises of messages by address, the latest last. */
  kept = new Map();
  /** As many as four images have. */
  most = 8;

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

  message(path) {
    const message = this.kept.get(path) ?? this.ask(path).then(async (answer) => unpack(await answer.arrayBuffer()));
    this.kept.delete(path);
    this.kept.set(path, message);
    message.catch(() => this.kept.delete(path));
    if (this.kept.size > this.most) this.kept.delete(this.kept.keys().next().value);
    return message;
  }

  about() {
    return this.json("api/about");
  }

  status(state) {
    return this.json(`api/status?${asked(state, "split", "student")}`);
  }

  gallery(state) {
    return this.json(`api/gallery?${asked(state, "split", "student", "order", "class", "page")}`);
  }

  /** The number of an image that is named by its file. */
  async find({ image, split }) {
    return (await this.json(`api/find?${new URLSearchParams({ name: image, split })}`)).image;
  }

  image(state) {
    return this.message(`api/image/${state.image}?${asked(state, "view", "split", "student")}`);
  }

  /** What speaks for a class, for "" the predicted one, or moves the features where there are none. */
  relevance(state, label = "") {
    const what = asked(state, "view", "split", "student");
    return this.message(`api/relevance/${state.image}?class=${label}&${what}`);
  }

  /** What a class's probability is without some patches or, without a class, how like the features are. */
  test(state, label, patches) {
    const what = asked(state, "view", "split", "student");
    return this.json(`api/test/${state.image}?class=${label ?? ""}&patches=${patches.join()}&${what}`);
  }

  pixels({ image, view, split }, side = 1600) {
    return `api/pixels/${image}?${asked({ view, split, side }, "view", "split", "side")}`;
  }

  /** The number of an image that is added: a file, or the name or path of one. */
  async add(name, file) {
    const answer = await this.ask(`api/images?${new URLSearchParams({ name })}`, { method: "POST", body: file });
    return (await answer.json()).image;
  }
}

class Embedded {
  offline = true;
  kept = new Map();

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
      ids.map(async (id) => ({ ...(await this.image({ image: id, view: 0, student })).header, id })),
    );
    return { items, total: items.length, page: 0, size: items.length };
  }

  async find({ image }) {
    const found = Object.entries(this.page.images).find(([, { file }]) => file === image);
    if (!found) throw new Error(`${image}: this page has no image of that name.`);
    return Number(found[0]);
  }

  found(image) {
    const found = this.page.images[image];
    if (found) return found;
    const ids = Object.keys(this.page.images).join(", ");
    throw new Error(`This page has only the images ${ids}, not image ${image}.`);
  }

  /** The content for a student or, where the page has none of that name, the first. */
  of(contents, { view, student }) {
    const [first] = Object.values(contents);
    return (contents[student] ?? first)[view];
  }

  async image(state) {
    return unpack(await inflated(this.of(this.found(state.image).maps, state)));
  }

  /** The page has the likeliest classes. */
  async relevance(state, label = "") {
    const messages = this.of(this.found(state.image).relevance, state);
    const { header } = await this.image(state);
    const message = messages[label === "" ? header.predicted : label];
    if (!message) throw new Error("this page has the likeliest classes alone.");
    return unpack(await inflated(message));
  }

  pixels({ image, view }) {
    return this.page.images[image]?.pixels[view] ?? "";
  }
}

export function openSource() {
  const embedded = document.getElementById("embedded");
  return embedded ? new Embedded(JSON.parse(embedded.textContent)) : new Server();
}
