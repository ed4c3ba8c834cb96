// What is shown, as the numbers that `gaupipe inspect --json` prints.

/** The object that `inspect --json` prints for what is shown: of `own` maps, and of those that a
 * student's are `compared` with. */
export function asJson({ state, own, compared }) {
  const { header, extra, grid } = own;
  const { image, layer, head, query, direction } = state;
  const shown = {
    image,
    label: header.label,
    predicted: header.predicted,
    probability: header.probability,
    by: header.name,
    layer,
    block: own.block(layer),
    head,
    query: /^x/.test(query) ? extra[own.row(query)] : query,
    grid,
    gaussian: own.gaussian(layer, head, query),
    map: rows(own),
    teacher: compared?.has(layer) ? rows(compared) : null,
    kl: own.divergence(layer, head, query),
  };
  if (extra.length) {
    const whole = own.whole(layer, head, query, direction);
    shown.extra = Object.fromEntries(extra.map((name, p) => [name, whole[p]]));
  }
  if (head === "gradient") shown.class = own.explained.class;
  if (header.no_teacher) shown.no_teacher = header.no_teacher;
  if (direction === "to") shown.direction = "to"; // inspect has no such map
  return shown;

  function rows(maps) {
    const weights = Array.from(maps.weights(layer, head, query, direction));
    return Array.from({ length: grid[0] }, () => weights.splice(0, grid[1]));
  }
}

/** Offers a file to be saved. */
export function save(content, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
