// Parallel coordinates on a canvas: a line for each thing over axes that stand beside each other.
import { evenly, tick } from "/static/numbers.js";
import { printing } from "/static/paper.js";
import { colour, fitted } from "/static/theme.js";
import { hideTip, showTip } from "/static/tip.js";

const FONT = "12px system-ui, sans-serif";
const [LEFT, RIGHT, TOP, BOTTOM] = [16, 84, 34, 14];
const NARROWEST = 92; // pixels between axes, where names and labels are still to be read
const APART = 15; // pixels between labels
const FEW = 12; // so many different numbers stand evenly apart, each with its label
const NEAR = 14; // pixels from the pointer to the line that is meant

/** Where values stand on an axis, from 0 below to 1 above, and its labels.
 *
 * Few values stand evenly apart. Of many numbers those above zero are on a logarithmic scale where they go over
 * decades, with zero and what has no value below them; `measured` numbers are never put evenly apart.
 */
export function scaleOf(values, said, measured = false) {
  const distinct = [...new Map(values.map((value) => [said(value), value])).values()];
  const numeric = values.every((value) => value === null || typeof value === "number");
  if (!numeric || (!measured && distinct.length <= FEW)) {
    const texts = distinct.sort((a, b) => (a === null ? -1 : b === null ? 1 : (a > b) - (a < b))).map(said);
    const place = (index) => (texts.length === 1 ? 0.5 : index / (texts.length - 1));
    const rank = new Map(texts.map((text, index) => [text, place(index)]));
    return { at: values.map((value) => rank.get(said(value))), labels: texts.map((text) => ({ text, at: rank.get(text) })) };
  }
  const known = values.filter((value) => value !== null);
  const above = known.filter((value) => value > 0);
  const log = known.every((value) => value >= 0) && above.length > 1 && greatest(above) / least(above) > 30;
  const scale = log ? Math.log10 : (value) => value;
  const used = (log ? above : known).map(scale);
  const [low, top] = [least(used), greatest(used)];
  // What has no place on the scale stands below it.
  const below = [...(values.includes(null) ? [null] : []), ...(log && known.includes(0) ? [0] : [])];
  const start = 0.12 * below.length;
  const of = (value) => (below.includes(value) ? 0.12 * below.indexOf(value) : start + ((1 - start) * (scale(value) - low)) / (top - low || 1));
  const ticks = log ? decades(low, top) : evenly(low, top);
  const labels = ticks.map((value) => ({ text: log || low === top ? said(value) : tick(value), at: of(value) })).filter(({ at }) => at >= start - 0.001 && at <= 1.001);
  return { at: values.map(of), labels: [...below.map((value) => ({ text: said(value), at: of(value) })), ...labels] };
}

const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity);
const greatest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);

function decades(low, top) {
  const found = [];
  for (let power = Math.ceil(low - 1e-9); power <= top + 1e-9; power++) found.push(10 ** power);
  return found.length > 1 ? found : [10 ** low, 10 ** top];
}

/** Such a picture in a figure; `words` say which thing is meant, `open` opens it, `order` is that of the arrow keys. */
export function crossings(figure, { words, open, order }) {
  const place = figure.querySelector(".canvas");
  const readout = figure.querySelector(".readout");
  const under = place.appendChild(document.createElement("canvas"));
  const over = place.appendChild(document.createElement("canvas"));
  const made = { figure, place, under, over, shown: null, marked: null, hovered: false };
  place.addEventListener("mousemove", (event) => {
    const index = nearest(made, event.offsetX, event.offsetY);
    if (index !== null || made.hovered) mark(made, index); // a line that keys chose stays until another is pointed at
    made.hovered = index !== null;
    if (index === null) hideTip();
    else showTip(event.clientX, event.clientY, words(index));
  });
  place.addEventListener("mouseleave", () => {
    if (made.hovered) mark(made, null);
    made.hovered = false;
    hideTip();
  });
  place.addEventListener("click", (event) => {
    const index = nearest(made, event.offsetX, event.offsetY);
    if (index !== null) open(index, event.ctrlKey || event.metaKey);
  });
  place.addEventListener("keydown", (event) => {
    if (made.shown === null) return;
    const all = order();
    const step = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, Home: -all.length, End: all.length }[event.key];
    if (event.key === "Enter" && made.marked !== null) open(made.marked, false);
    if (step === undefined) return;
    event.preventDefault();
    mark(made, all[Math.min(all.length - 1, Math.max(0, all.indexOf(made.marked) + step))]);
    readout.textContent = words(made.marked).join("; ");
  });
  return made;
}

/** Draws it anew: `axes` as `scaleOf` has them with their names, `style` of each line its colour, opacity and width. */
export function drawCrossings(made, { axes, style }) {
  const { place, figure, under, over } = made;
  place.style.width = "";
  // Paper has no room beside it to scroll to.
  const least = printing() ? 0 : LEFT + RIGHT + NARROWEST * (axes.length - 1);
  const width = Math.max(place.parentElement.clientWidth, least);
  place.style.width = `${width}px`;
  const height = place.clientHeight;
  for (const canvas of [under, over]) {
    canvas.width = width * devicePixelRatio;
    canvas.height = height * devicePixelRatio;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
  const gap = axes.length > 1 ? (width - LEFT - RIGHT) / (axes.length - 1) : 0;
  const x = (axis) => LEFT + gap * axis;
  const y = (share) => TOP + (1 - share) * (height - TOP - BOTTOM);
  made.shown = { axes, style, x, y, gap, count: axes[0]?.at.length ?? 0 };
  const pen = penOf(under);
  for (let index = 0; index < made.shown.count; index++) {
    const { colour: ink, opacity, width: thick } = style(index);
    trace(pen, made.shown, index, ink, opacity, thick);
  }
  pen.globalAlpha = 1;
  pen.font = FONT;
  axes.forEach((axis, which) => labelled(pen, axis, x(which), y, gap || width));
  mark(made, null);
  figure.dataset.drawn = String(made.shown.count);
}

function penOf(canvas) {
  const pen = canvas.getContext("2d");
  pen.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
  pen.clearRect(0, 0, canvas.width, canvas.height);
  return pen;
}

function trace(pen, { axes, x, y }, index, ink, opacity, thick) {
  pen.globalAlpha = opacity;
  pen.strokeStyle = ink;
  pen.lineWidth = thick;
  pen.beginPath();
  axes.forEach(({ at }, axis) => pen.lineTo(x(axis), y(at[index])));
  pen.stroke();
}

/** An axis with its name and as many of its labels as do not touch; each has an edge in the page's colour. */
function labelled(pen, { name, labels }, x, y, room) {
  pen.strokeStyle = colour("quiet");
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(x, y(0));
  pen.lineTo(x, y(1));
  pen.stroke();
  pen.textBaseline = "middle";
  pen.textAlign = "left";
  written(pen, fitted(pen, name, room - 10), x - 4, TOP - 18, colour("text"));
  let last = Infinity;
  for (const { text, at } of [...labels].sort((a, b) => a.at - b.at)) {
    if (last - y(at) < APART) continue;
    last = y(at);
    pen.beginPath();
    pen.moveTo(x, y(at));
    pen.lineTo(x + 4, y(at));
    pen.stroke();
    written(pen, fitted(pen, text, room - 16), x + 7, y(at), colour("quiet"));
  }
}

function written(pen, text, x, y, ink) {
  pen.save();
  pen.lineJoin = "round";
  pen.lineWidth = 3;
  pen.strokeStyle = colour("page");
  pen.strokeText(text, x, y);
  pen.fillStyle = ink;
  pen.fillText(text, x, y);
  pen.restore();
}

/** The line that passes nearest to a place, or none. */
function nearest({ shown }, left, top) {
  if (shown === null || shown.axes.length < 2) return null;
  const { axes, x, y, gap, count } = shown;
  const axis = Math.min(axes.length - 2, Math.max(0, Math.floor((left - x(0)) / gap)));
  const share = Math.min(1, Math.max(0, (left - x(axis)) / gap));
  let [found, least] = [null, NEAR];
  for (let index = 0; index < count; index++) {
    const away = Math.abs(y(axes[axis].at[index] * (1 - share) + axes[axis + 1].at[index] * share) - top);
    if (away < least) [found, least] = [index, away];
  }
  return found;
}

/** One line before all others. */
function mark(made, index) {
  made.marked = index;
  const pen = penOf(made.over);
  if (index !== null && made.shown !== null) trace(pen, made.shown, index, colour("text"), 1, 3);
}
