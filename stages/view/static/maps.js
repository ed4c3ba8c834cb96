// The maps of one image, as the server computes them: for each block those of its heads, their mean
// and the rollout. A map has N x N weights, row by row: row q says how much query q reads from each
// key. Class and register tokens come first, then the patches of a grid of h x w, row by row.

export class Maps {
  constructor(header, { maps, gaussians, kl }, blocks = null) {
    Object.assign(this, { header, gaussians, kl, blocks });
    this.values = maps.values;
    this.layers = header.layers;
    this.heads = header.heads;
    this.grid = header.grid;
    this.tokens = header.grid[0] * header.grid[1];
    this.size = maps.shape[2]; // of a row
    this.extra = header.extra.slice(0, this.size - this.tokens); // names of the first tokens
    this.columns = [...Array(this.heads).keys(), "mean"];
    // a product of maps leads through all blocks, so it is none where some are not stored
    if (header.blocks.every((number, layer) => number === layer)) this.columns.push("rollout");
    if (header.explains) this.columns.push("gradient");
    this.relevance = null; // for the "gradient" of a class, which the server computes on its own
    this.explained = null; // that class, null for features, and its probability
    this.means = new Map();
  }

  /** The row of a query: a number of a patch, or "x0", "x1", ... of a class or register token. */
  row(query) {
    return typeof query === "number" ? this.extra.length + query : Number(query.slice(1));
  }

  /** The number of a block in its model, of which a store may hold some. */
  block(layer) {
    return this.header.blocks[layer];
  }

  /** Whether a block has maps: those that a student's are compared with may be of some alone. */
  has(layer) {
    return this.blocks?.[layer] ?? true;
  }

  /** A map [N * N] of one head, of their "mean", the "rollout" up to a block, or the rollout weighted
   * by the "gradient" of a class; null where it is not known yet. */
  map(layer, head) {
    const length = this.size ** 2;
    if (head === "gradient") {
      return this.relevance?.values.subarray(layer * length, (layer + 1) * length) ?? null;
    }
    const place = layer * (this.heads + 2) + this.columns.indexOf(head);
    return this.values.subarray(place * length, (place + 1) * length);
  }

  /** The weights of all tokens [N]: what a query reads from each key or, in the direction "to", what
   * each query reads from a key. Without a query: what each key gets on average from patches. */
  whole(layer, head, query, direction) {
    const { size } = this;
    if (head === "gradient" && this.single) return this.relevance.values.subarray(layer * size, (layer + 1) * size);
    const map = this.map(layer, head);
    if (!map) return new Float32Array(size);
    if (query === "mean") return this.mean(layer, head, map);
    const row = this.row(query);
    if (direction === "from") return map.subarray(row * size, (row + 1) * size);
    return Float32Array.from({ length: size }, (_, q) => map[q * size + row]);
  }

  /** What each key gets on average from patches; summed once for each map. */
  mean(layer, head, map) {
    const key = `${layer}/${head}`;
    if (this.means.get(key)?.map !== map.buffer) {
      const { size } = this;
      const sums = new Float64Array(size);
      for (let i = this.extra.length * size; i < map.length; i += size) {
        for (let k = 0; k < size; k++) sums[k] += map[i + k];
      }
      this.means.set(key, { map: map.buffer, weights: Float32Array.from(sums, (sum) => sum / this.tokens) });
    }
    return this.means.get(key).weights;
  }

  /** Whether the gradient is known for one query alone: that of features, or in a page without a
   * server. */
  get single() {
    return this.relevance?.shape[1] === 1;
  }

  /** These maps with the gradient of another class. */
  explaining({ header, arrays }) {
    const other = Object.assign(Object.create(Maps.prototype), this, { means: new Map() });
    return Object.assign(other, { relevance: arrays.relevance, explained: header });
  }

  /** The weights [T] of the patches. */
  weights(layer, head, query, direction) {
    return this.whole(layer, head, query, direction).subarray(this.extra.length);
  }

  /** A number of a head (stages/look/measures.py); null where it is not known. */
  number(name, layer, head) {
    return this.header.numbers[name]?.[layer]?.[head] ?? null;
  }

  /** The Gaussian of a query, [mean_x, mean_y, std_x, std_y]; null where there is none. */
  gaussian(layer, head, query) {
    if (!this.gaussians || typeof head !== "number" || typeof query !== "number") return null;
    const place = 4 * ((layer * this.heads + head) * this.tokens + query);
    return Array.from(this.gaussians.values.subarray(place, place + 4));
  }

  /** KL from the teacher's map, in nats: mean over the heads and queries that are chosen, each a
   * number or "mean"; null where there is none. */
  divergence(layer, head, query) {
    if (!this.kl || !this.header.compared[layer]) return null;
    const heads = head === "mean" ? [...Array(this.heads).keys()] : [head];
    const queries = query === "mean" ? [...Array(this.tokens).keys()] : [query];
    const chosen = heads.flatMap((one) =>
      queries.map((q) => this.kl.values[(layer * this.heads + one) * this.tokens + q]),
    );
    return heads.every(Number.isInteger) ? chosen.reduce((sum, kl) => sum + kl) / chosen.length : null;
  }
}

/** Weights of a grid of h x w in which no patch has more than the most of its neighbours: a lone
 * bright patch, which is often a sink, is as bright as what is beside it. */
export function capped(weights, [h, w]) {
  return weights.map((weight, i) => {
    const [x, y] = [i % w, Math.floor(i / w)];
    let most = 0;
    for (let v = Math.max(y - 1, 0); v <= Math.min(y + 1, h - 1); v++) {
      for (let u = Math.max(x - 1, 0); u <= Math.min(x + 1, w - 1); u++) {
        if (u !== x || v !== y) most = Math.max(most, weights[v * w + u]);
      }
    }
    return Math.min(weight, most);
  });
}
