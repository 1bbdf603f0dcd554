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
const powers = (value, digits = 3) => Number(value.toPrecision(digits)).toExponential().replace(/e\+?0$/, "").replace("e+", "e");

/** A number, or a text that is one, in few digits. */
export function short(value) {
  const number = Number(value);
  return extreme(number) ? powers(number) : grouped(number.toPrecision(4), 7);
}

/** A field's value: what is whole has all its digits, as others are told apart by them. */
export function said(value) {
  if (value === null || value === undefined) return "none";
  if (typeof value === "number") return Number.isSafeInteger(value) ? grouped(value) : short(value);
  return typeof value === "string" ? value : JSON.stringify(value);
}

/** A round number, as beside an axis: in all of its digits, as its neighbours may differ in the last of them alone. */
export function tick(value) {
  const number = Number(value);
  return extreme(number) ? powers(number, 7) : grouped(number.toPrecision(7), 9);
}

/** Numbers beside an axis, all of them in powers of ten where one has to be; what is left out has no text. */
export function ticks(values) {
  const known = values.filter((value) => value !== null);
  const write = known.some(extreme) ? (value) => (value === 0 ? "0" : powers(value, 7)) : tick;
  return values.map((value) => (value === null ? "" : write(value)));
}
