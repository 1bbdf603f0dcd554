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

/**
 * A number with so many decimals, a very large one by its power of ten; one of which they would show nothing by its first
 * digits, unless it is the deviation of a `mean` of which they show some.
 */
export function inDigits(value, decimals, mean = value) {
  if (Math.abs(value) >= 1e15) return value.toExponential(3);
  const text = value.toFixed(decimals);
  if (Number(text) !== 0) return text;
  if (value === 0 || Number(mean.toFixed(decimals)) !== 0) return text.replace("-", "");
  return Math.abs(value) < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(2)));
}

/** A field's value: what is whole has all its digits, as others are told apart by them. */
export function said(value) {
  if (value === null || value === undefined) return "none";
  if (typeof value === "number") return Number.isSafeInteger(value) ? grouped(value) : short(value);
  return typeof value === "string" ? value : JSON.stringify(value);
}

const WHOLE = 5; // so long lists are shown whole

/** How the values of a field are said: with as few digits and numbers of lists as leave different values different. */
export function telling(values) {
  const distinct = [...new Map(values.map((value) => [JSON.stringify(value ?? null), value])).values()];
  const digits = Array.from({ length: 14 }, (_, more) => 4 + more);
  const ways = [WHOLE, Infinity].flatMap((longest) => digits.map((most) => (value) => written(value, most, longest)));
  return ways.find((way) => new Set(distinct.map(way)).size === distinct.length) ?? said;
}

function written(value, digits, longest) {
  const rounded = typeof value === "number" && !Number.isInteger(value) && digits > 4;
  if (rounded) return String(Number(value.toPrecision(digits)));
  if (!Array.isArray(value)) return said(value);
  const numbers = value.map((one) => (typeof one === "number" ? written(one, digits, longest) : JSON.stringify(one)));
  if (numbers.length <= longest) return `[${numbers.join(", ")}]`;
  return `[${[...numbers.slice(0, 2), "…", numbers.at(-1)].join(", ")}] (${numbers.length})`;
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

/** The step of an axis between these numbers that makes five steps or a few more. */
function stepOf(low, top) {
  const rough = (top - low) / 5;
  const unit = 10 ** Math.floor(Math.log10(rough));
  return unit * [1, 2, 5, 10].find((factor) => factor * unit >= rough * 0.999);
}

/** Round numbers, evenly apart, between two. */
export function evenly(low, top, step = stepOf(low, top)) {
  if (low === top) return [low];
  const first = Math.ceil(low / step);
  const count = Math.floor(top / step + 1e-6) - first + 1; // one after the other some would be the same as floats
  return [...new Set(Array.from({ length: Math.max(0, count) }, (_, at) => Number(((first + at) * step).toPrecision(12))))];
}
