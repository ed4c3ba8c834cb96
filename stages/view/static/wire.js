// Messages of the server: a JSON header and arrays (stages/view/wire.py).

const HALVES = new Float32Array(65536);
for (let bits = 0; bits < 65536; bits++) {
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  let value = fraction * 2 ** -24;
  if (exponent === 31) value = fraction ? NaN : Infinity;
  else if (exponent) value = (1 + fraction / 1024) * 2 ** (exponent - 15);
  HALVES[bits] = bits & 32768 ? -value : value;
}

/** float16 numbers, as their bits, in float32. */
export function fromHalves(bits) {
  const values = new Float32Array(bits.length);
  for (let i = 0; i < bits.length; i++) values[i] = HALVES[bits[i]];
  return values;
}

/** {header, arrays}: each array has `values`, flat, and `shape`. */
export function unpack(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const arrays = {};
  for (const [name, [dtype, shape, offset]] of Object.entries(header.arrays)) {
    const size = shape.reduce((product, n) => product * n, 1);
    const start = 4 + length + offset;
    const types = {
      float16: Uint16Array, float32: Float32Array, uint8: Uint8Array, uint16: Uint16Array,
    };
    const stored = new types[dtype](buffer, start, size);
    arrays[name] = { shape, values: dtype === "float16" ? fromHalves(stored) : stored };
  }
  return { header, arrays };
}

/** The bytes of base64 text. */
export function decoded(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0)).buffer;
}
