// What is shown, as the numbers that `gaupipe inspect --json` prints.

import { divergence } from "./maps.js";

/** The weights as a list of h lists of w numbers. */
export function asRows(weights, [h, w]) {
  return Array.from({ length: h }, (_, y) => Array.from(weights.subarray(y * w, (y + 1) * w)));
}

/** The object that `inspect --json` prints for what is shown: `maps`, and those that a student's
 * are compared with in `teacher`. */
export function asJson(state, maps, teacher) {
  const { header } = maps;
  const { layer, head, query, direction } = state;
  const compared = teacher?.has(layer);
  const shown = {
    image: state.image,
    label: header.label,
    predicted: header.predicted ?? null,
    probability: header.probability ?? null,
    by: header.name,
    layer,
    head,
    query: typeof query === "string" && query !== "mean" ? maps.extra[maps.row(query)] : query,
    grid: maps.grid,
    gaussian: maps.gaussian(layer, head, query),
    map: asRows(maps.weights(layer, head, query, direction), maps.grid),
    teacher: compared ? asRows(teacher.weights(layer, head, query, direction), maps.grid) : null,
    kl: compared ? divergence(maps, teacher, layer, head, query) : null,
  };
  if (maps.extra.length) {
    const whole = maps.whole(layer, head, query, direction);
    shown.extra = Object.fromEntries(maps.extra.map((name, p) => [name, whole[p]]));
  }
  if (head === "gradient") shown.class = maps.relevanceClass;
  if (header.no_teacher) shown.no_teacher = header.no_teacher;
  if (direction === "to") shown.direction = "to"; // inspect has no such map
  return shown;
}

/** Offers a file to be saved. */
export function save(content, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
