// Reads a store with zarrita alone. Usage: node read.js FOLDER
// Prints {"array": {"shape": [...], "dtype": "...", "sha256": "digest of the numbers, little-endian, C order"}}.
import { createHash } from "node:crypto";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { Float16Array } from "@petamoriken/float16";

globalThis.Float16Array ??= Float16Array; // built in from node 24 on
const zarr = await import("zarrita");

const folder = process.argv[2];
const store = {
  async get(key) {
    try {
      return new Uint8Array(readFileSync(join(folder, key)));
    } catch (error) {
      if (error.code === "ENOENT") return undefined; // zarrita's word for a chunk that is not there
      throw error;
    }
  },
  async getRange(key, range) {
    const data = await this.get(key);
    return "suffixLength" in range ? data?.slice(-range.suffixLength)
                                   : data?.slice(range.offset, range.offset + range.length);
  },
};

const found = {};
for (const entry of readdirSync(folder, { withFileTypes: true })) {
  if (!entry.isDirectory()) continue;
  const node = await zarr.open(zarr.root(store).resolve(entry.name));
  if (node.kind !== "array") continue;
  const { data, shape } = await zarr.get(node);
  const bytes = new Uint8Array(data.buffer, data.byteOffset, data.byteLength);
  found[entry.name] = { shape, dtype: node.dtype, sha256: createHash("sha256").update(bytes).digest("hex") };
}
console.log(JSON.stringify(found));
