// Numbers as pages write them, with scripts and without.

/** A number with its thousands apart. */
export function grouped(number, digits = 0) {
  return Number(number).toLocaleString("en", { maximumFractionDigits: digits }).replaceAll(",", "\u202f");
}

/** "1 trial", "2 trials". */
export function count(number, name) {
  return `${grouped(number)} ${name}${number === 1 ? "" : "s"}`;
}

const extreme = (value) => value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3);
const powers = (value) => Number(value.toPrecision(3)).toExponential().replace(/e\+?0$/, "").replace("e+", "e");

/** A number, or a text that is one, in few digits. */
export function short(value) {
  const number = Number(value);
  return extreme(number) ? powers(number) : grouped(number.toPrecision(4), 7);
}

/** Numbers beside an axis, all of them in powers of ten where one has to be; what is left out has no text. */
export function ticks(values) {
  const known = values.filter((value) => value !== null);
  const write = known.some(extreme) ? (value) => (value === 0 ? "0" : powers(value)) : short;
  return values.map((value) => (value === null ? "" : write(value)));
}
