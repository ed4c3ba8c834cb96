// Attention maps from stored numbers. A map is T x T weights, row by row: row q says how much query
// q reads from each key, and sums to 1. Tokens lie on a grid of h x w, counted row by row.

const MIN_STD = 1e-3; // in tokens, as in gaupipe/maps/gaussians.py
const MAX_STD = 2e3;

/** The complementary error function, to about 1e-13 of its value. */
export function erfc(x) {
  if (x < 0) return 2 - erfc(-x);
  const square = x * x;
  if (x < 2) {
    // erf as a series of positive terms
    let term = x;
    let sum = x;
    for (let n = 1; term > sum * 1e-17; n++) {
      term *= (2 * square) / (2 * n + 1);
      sum += term;
    }
    return 1 - (2 / Math.sqrt(Math.PI)) * Math.exp(-square) * sum;
  }
  let fraction = x; // a continued fraction, from its end
  for (let n = Math.ceil(12 + 200 / square); n > 0; n--) fraction = x + n / 2 / fraction;
  return Math.exp(-square) / (Math.sqrt(Math.PI) * fraction);
}

/** What each of n tokens of an axis gets, on average over a Gaussian in normalised coordinates, when
 * points are read by linear interpolation. */
export function axisWeights(mean, std, n) {
  const weights = new Float64Array(n);
  if (n === 1) {
    weights[0] = 1;
    return weights;
  }
  const wide = std * ((n - 1) / 2);
  const centre = (mean + 1) * ((n - 1) / 2) * (MAX_STD / Math.max(wide, MAX_STD));
  const sigma = Math.min(Math.max(wide, MIN_STD), MAX_STD);
  // E[max(0, u - j)] is max(0, centre - j) and an even rest
  let before = 1;
  let restBefore = 0;
  let rest = evenRest(centre, sigma);
  for (let j = 0; j < n; j++) {
    const last = j === n - 1;
    const next = last ? 0 : evenRest(centre - j - 1, sigma);
    const slope = last ? 0 : Math.min(Math.max(centre - j, 0), 1);
    const more = last ? 0 : rest - next;
    weights[j] = Math.max(before - slope + (restBefore - more), 0);
    before = slope;
    restBefore = more;
    rest = next;
  }
  return weights;
}

function evenRest(distance, sigma) {
  const far = Math.abs(distance);
  const z = far / (sigma * Math.SQRT2);
  if (z > 9.3) return 0; // less than float32 can say
  return sigma * Math.sqrt(0.5 / Math.PI) * Math.exp(-z * z) - 0.5 * far * erfc(z);
}

/** For each kind of numbers, under the name that its class in store/kinds.py gives, how row `r` of
 * all rows is made: (arrays, r, row, header). */
export const ROWS = {
  gaussians({ gaussians }, r, row, { grid }) {
    const [h, w] = grid;
    const [meanX, meanY, stdX, stdY] = gaussians.values.subarray(4 * r, 4 * r + 4);
    const alongX = axisWeights(meanX, stdX, w);
    const alongY = axisWeights(meanY, stdY, h);
    for (let y = 0; y < h; y++) {
      for (let x = 0; x < w; x++) row[y * w + x] = alongY[y] * alongX[x];
    }
  },
  keys({ keys, weights }, r, row) {
    const k = keys.shape[3];
    let sum = 0;
    for (let i = r * k; i < (r + 1) * k; i++) sum += weights.values[i];
    const rest = Math.max(1 - sum, 0);
    row.fill(rest / Math.max(row.length - k, 1));
    for (let i = r * k; i < (r + 1) * k; i++) row[keys.values[i]] = weights.values[i];
    const total = row.reduce((whole, weight) => whole + weight, 0);
    for (let j = 0; j < row.length; j++) row[j] /= total;
  },
  maps({ maps }, r, row, { encoding }) {
    const start = r * row.length;
    row.set(maps.values.subarray(start, start + row.length));
    if (encoding !== "uint8") return;
    const total = row.reduce((whole, weight) => whole + weight, 0);
    for (let j = 0; j < row.length; j++) row[j] /= total;
  },
};

/** The maps of one image, made when they are asked for. */
export class Maps {
  constructor(header, arrays) {
    Object.assign(this, { header, arrays });
    this.layers = header.layers;
    this.heads = header.heads;
    this.grid = header.grid;
    this.tokens = header.grid[0] * header.grid[1];
    this.extra = header.extra ?? []; // names of class and register tokens, which come first
    this.size = this.extra.length + this.tokens; // of a row
    this.makeRow = ROWS[header.rows];
    this.made = new Map();
  }

  kept(name, make) {
    if (!this.made.has(name)) this.made.set(name, make());
    return this.made.get(name);
  }

  /** Whether a block has maps. */
  has() {
    return true;
  }

  /** The row of a query: a number of a patch, or "x0", "x1", ... of a class or register token. */
  row(query) {
    return typeof query === "number" ? this.extra.length + query : Number(query.slice(1));
  }

  /** A map [size * size] of one head, of their "mean", the "rollout" up to a block, or the rollout
   * weighted by the "gradient" of a class, which the server computes. */
  map(layer, head) {
    return this.kept(`${layer}/${head}`, () => {
      if (head === "rollout") return this.makeRollout(layer);
      if (head === "mean") return this.makeMean(layer);
      if (head === "gradient") return this.makeRelevance(layer);
      return this.makeMap(layer, head);
    });
  }

  makeMap(layer, head) {
    const { size } = this;
    const map = new Float32Array(size * size);
    const row = new Float64Array(size);
    const first = (layer * this.heads + head) * size;
    for (let q = 0; q < size; q++) {
      row.fill(0);
      this.makeRow(this.arrays, first + q, row, this.header);
      map.set(row, q * size);
    }
    return map;
  }

  makeRelevance(layer) {
    const length = this.size ** 2;
    if (!this.relevance) return new Float32Array(length);
    return this.relevance.arrays.relevance.values.subarray(layer * length, (layer + 1) * length);
  }

  /** Takes the relevance of a class, of which earlier maps are forgotten. */
  explain(relevance) {
    for (const name of this.made.keys()) if (name.includes("gradient")) this.made.delete(name);
    this.relevance = relevance;
  }

  makeMean(layer) {
    const sum = new Float32Array(this.size ** 2);
    for (let head = 0; head < this.heads; head++) {
      const map = this.map(layer, head);
      for (let i = 0; i < sum.length; i++) sum[i] += map[i] / this.heads;
    }
    return sum;
  }

  /** Attention rollout: the product of the blocks' mean maps, each half attention and half identity
   * for the residual connection (Abnar and Zuidema, 2020). */
  makeRollout(layer) {
    const { size } = this;
    const mean = this.map(layer, "mean");
    const step = new Float32Array(mean.length);
    for (let i = 0; i < mean.length; i++) step[i] = mean[i] / 2;
    for (let q = 0; q < size; q++) step[q * size + q] += 0.5;
    if (layer === 0) return step;
    if (!this.has(layer - 1)) return step;
    const before = this.map(layer - 1, "rollout");
    const product = new Float32Array(mean.length);
    const row = new Float64Array(size);
    for (let q = 0; q < size; q++) {
      row.fill(0);
      for (let k = 0; k < size; k++) {
        const weight = step[q * size + k];
        const start = k * size;
        for (let j = 0; j < size; j++) row[j] += weight * before[start + j];
      }
      product.set(row, q * size);
    }
    return product;
  }

  /** Weights [T] of the patches: what a query reads from each key or, in the direction "to", what
   * each query reads from a key. Without a query: what each key gets on average from patches. */
  weights(layer, head, query, direction) {
    return this.whole(layer, head, query, direction).subarray(this.extra.length);
  }

  /** The weights of all tokens [size], those of class and register tokens first. */
  whole(layer, head, query, direction) {
    const map = this.map(layer, head);
    const { size, tokens, extra } = this;
    if (query !== "mean" && direction === "from") {
      const row = this.row(query);
      return map.subarray(row * size, (row + 1) * size);
    }
    if (query !== "mean") {
      const key = this.row(query);
      return Float32Array.from({ length: size }, (_, q) => map[q * size + key]);
    }
    return this.kept(`received/${layer}/${head}`, () => {
      const sums = new Float64Array(size);
      for (let i = extra.length * size; i < map.length; i++) sums[i % size] += map[i];
      return Float32Array.from(sums, (sum) => sum / tokens);
    });
  }

  /** The entropy of a head's rows in nats, mean over queries: 0 for one key, ln T for all alike. */
  entropy(layer, head) {
    return this.kept(`entropy/${layer}/${head}`, () => {
      let sum = 0;
      for (const weight of this.map(layer, head)) if (weight > 0) sum -= weight * Math.log(weight);
      return sum / this.size;
    });
  }

  /** How far a head looks: the distance of query and key in tokens, mean over attention and
   * queries. */
  distance(layer, head) {
    return this.kept(`distance/${layer}/${head}`, () => {
      const map = this.map(layer, head);
      const distances = this.distances();
      const { size, tokens, extra } = this;
      let sum = 0;
      let total = 0; // of attention from patches to patches
      for (let q = 0; q < tokens; q++) {
        const start = (extra.length + q) * size + extra.length;
        for (let k = 0; k < tokens; k++) {
          sum += map[start + k] * distances[q * tokens + k];
          total += map[start + k];
        }
      }
      return sum / total;
    });
  }

  /** The distance of every query and key in tokens [T * T]. */
  distances() {
    return this.kept("distances", () => {
      const { tokens, grid } = this;
      const distances = new Float32Array(tokens * tokens);
      for (let q = 0; q < tokens; q++) {
        for (let k = 0; k < tokens; k++) {
          const across = (k % grid[1]) - (q % grid[1]);
          const down = Math.floor(k / grid[1]) - Math.floor(q / grid[1]);
          distances[q * tokens + k] = Math.hypot(across, down);
        }
      }
      return distances;
    });
  }

  /** The Gaussian of a query, [mean_x, mean_y, std_x, std_y]; null where the store has none. */
  gaussian(layer, head, query) {
    const { gaussians } = this.arrays;
    if (!gaussians || typeof head !== "number" || query === "mean") return null;
    const r = (layer * this.heads + head) * this.tokens + query;
    return Array.from(gaussians.values.subarray(4 * r, 4 * r + 4));
  }
}

/** The stored maps that a student is compared with, block by block of the student. */
export class ComparedMaps extends Maps {
  constructor(header, teacher) {
    super({ ...header, explains: false }, { maps: teacher });
    this.places = header.compared;
  }

  has(layer) {
    return this.places[layer] !== null;
  }

  makeMap(layer, head) {
    const size = this.tokens ** 2;
    const start = (this.places[layer] * this.heads + head) * size;
    return this.arrays.maps.values.slice(start, start + size);
  }
}

const TINY = 1.1754943508222875e-38;

/** KL of own rows from the teacher's, teacher first, in nats: mean over the heads and queries that
 * are chosen, each a number or "mean". */
export function divergence(own, teacher, layer, head, query) {
  if (!teacher || !teacher.has(layer)) return null;
  if (head === "rollout" || head === "gradient") return null;
  const heads = head === "mean" ? [...Array(own.heads).keys()] : [head];
  const size = own.tokens;
  const [first, last] = query === "mean" ? [0, size] : [query, query + 1];
  let sum = 0;
  for (const one of heads) {
    const p = teacher.map(layer, one);
    const q = own.map(layer, one);
    for (let i = first * size; i < last * size; i++) {
      sum += p[i] * (Math.log(Math.max(p[i], TINY)) - Math.log(Math.max(q[i], TINY)));
    }
  }
  return sum / heads.length / (last - first);
}
