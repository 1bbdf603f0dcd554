// Charts of lines below each other in a figure: drag to zoom, one cursor, arrow keys, what lies under the pointer.
import uPlot from "/static/lib/uplot.js";
import { evenly } from "/static/numbers.js";
import { FINE, printing } from "/static/paper.js";
import { element } from "/static/request.js";
import { colour, fitted, onScheme } from "/static/theme.js";
import { hideTip, showTip } from "/static/tip.js";

const SAVED = 2; // at least so many pixels to a point of a picture that is saved
const HIGHEST = 60_000; // pixels: a browser makes no picture of a canvas that is much higher

/** A colour, of six digits or of three numbers, see-through. */
export function clear(rgb, alpha) {
  const parts = rgb.startsWith("#")
    ? [1, 3, 5].map((at) => parseInt(rgb.slice(at, at + 2), 16))
    : rgb.match(/[\d.]+/g).slice(0, 3).map(Number);
  return `rgba(${parts.join(",")},${alpha})`;
}

/** How an axis and its grid look, and what stands below it. */
export function axis(label = null) {
  const named = label === null ? {} : { label, labelSize: 18, labelGap: 0, labelFont: "12px system-ui, sans-serif" };
  return { ...named, stroke: colour("quiet"), grid: { stroke: colour("grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
}

const [LEAST, BEYOND] = [1e-18, 1e31]; // what is less or more than these uPlot draws on zero, or without numbers beside it
const STEPS = Array.from({ length: 340 }, (_, at) => at - 32).flatMap((power) => [1, 2, 2.5, 5].map((times) => Number(`${times}e${power}`)));
const DECADES = 8; // at most beside a logarithmic axis

/** Powers of ten between two numbers, or what lies between two of them. */
function decades(_, which, low, high) {
  const [first, last] = [Math.ceil(Math.log10(low) - 1e-9), Math.floor(Math.log10(high) + 1e-9)];
  if (last <= first) return [1, 2, 3, 4, 5, 6, 7, 8, 9, 10].map((times) => times * 10 ** Math.floor(Math.log10(low))).filter((value) => value >= low && value <= high);
  const every = Math.ceil((last - first) / DECADES);
  return Array.from({ length: Math.floor((last - first) / every) + 1 }, (_, at) => 10 ** (first + at * every));
}

/** From where to where a linear axis goes on which such values stand. */
function around(low, high) {
  if (low === null) return [null, null];
  if (low === 0 && high === 0) return [0, 1];
  if (Math.max(-low, high) >= LEAST) return uPlot.rangeNum(low, high, 0.1, true);
  const room = 0.1 * (high - low || Math.abs(high));
  return [low < 0 ? low - room : Math.max(0, low - room), high > 0 ? high + room : Math.min(0, high + room)];
}

/** The scale of such columns and what its axis needs, however small or large they are, as a loss that diverges is. */
export function heights(columns, log) {
  const extreme = (value) => value > BEYOND || (value > 0 && value < 1 / BEYOND);
  if (log) return { scale: { distr: 3 }, beside: columns.some((values) => values.some(extreme)) ? { incrs: STEPS, splits: decades } : {} };
  const splits = (_, which, low, high, step) => evenly(low, high, high - low < LEAST ? undefined : step);
  return { scale: { range: (_, low, high) => around(low, high) }, beside: { incrs: STEPS, splits } };
}

/** uPlot's options for a chart with all its parts so many times as large: it draws so many pixels to a point alone. */
function enlarged({ axes, series, ...options }, times) {
  const fonts = (font) => font.replace(/[\d.]+px/, (size) => `${times * parseFloat(size)}px`);
  const wider = (line) => line && { ...line, width: times * (line.width ?? 2) };
  return {
    ...options,
    width: times * options.width,
    height: times * options.height,
    padding: [17, 17, 0, 0].map((room) => times * room),
    axes: axes.map((one, which) => ({
      ...one,
      font: fonts(one.font),
      grid: wider(one.grid),
      gap: times * 5,
      space: times * (which === 0 ? 50 : 30),
      size: times * one.size,
      ...(one.label ? { labelFont: fonts(one.labelFont), labelSize: times * one.labelSize } : {}),
    })),
    series: series.map(({ width, dash, points, ...one }, which) =>
      which === 0
        ? one
        : { ...one, width: times * (width ?? 1), dash: dash?.map((length) => times * length), points: { ...points, size: times * (points?.size ?? 5) } },
    ),
  };
}

/** From the least to the largest x, and a little beyond where these are one. */
export const AROUND = { time: false, range: (_, low, high) => (low === high ? [low - 0.5, high + 0.5] : [low, high]) };

/**
 * What kinds of charts share. Theirs are `drawAll()`, and `lines(plot, index, near)`: what is said at an x, `near` the
 * height of the pointer or null. `height` is that of each chart, `wide` the room from which three stand side by side.
 */
export class Charts {
  constructor(figure, { height, wide }) {
    this.figure = figure;
    this.place = figure.querySelector(".charts-live");
    this.readout = figure.querySelector(".readout");
    this.height = height;
    this.wide = wide;
    this.plots = [];
    this.marking = null;
    this.from = null;
    this.marked = null;
    this.zoom = null;
    this.width = 0;
    this.times = 1;
    this.stale = false;
    onScheme(() => this.draw());
    new ResizeObserver(() => {
      const width = this.place.clientWidth;
      if (width === 0) return;
      if (this.stale) this.draw();
      else if (width !== this.width) this.fit(this.plots.length);
      this.width = width;
    }).observe(this.place);
  }

  /** Draws what there is; where nothing is to be seen now, once it is. */
  draw() {
    this.width = this.place.clientWidth;
    this.stale = this.width === 0;
    this.times = printing() ? Math.max(1, FINE / devicePixelRatio) : 1;
    if (this.stale) return;
    const held = this.plots.findIndex(({ root }) => root === document.activeElement);
    const x = this.plots[held]?.data[0][this.plots[held].cursor.idx];
    const from = this.marking === this.plots[held] && this.marked !== null ? this.marking.data[0][this.from] : null;
    this.drawAll();
    if (this.zoom) for (const plot of this.plots) plot.setScale("x", this.zoom);
    const plot = this.plots[held];
    if (plot === undefined) return;
    // Keys go on where they were, and what they have marked is marked, once it is drawn.
    plot.root.focus({ preventScroll: true });
    const xs = plot.data[0];
    if (!xs.includes(x)) return;
    queueMicrotask(() => {
      plot.setCursor({ left: plot.valToPos(x, "x"), top: plot.over.clientHeight / 3 });
      if (xs.includes(from)) this.mark(plot, [xs.indexOf(from), xs.indexOf(x)]);
    });
  }

  /** Takes all charts away. */
  empty() {
    for (const plot of this.plots) plot.destroy();
    this.plots = [];
    this.marked = this.from = null;
    this.place.replaceChildren();
    hideTip();
  }

  widthOf(count) {
    const room = this.place.clientWidth;
    const columns = count > 1 && room >= 900 ? (count > 2 && room >= this.wide ? 3 : 2) : 1;
    return Math.floor((room - (columns - 1) * 16) / columns);
  }

  /** All charts as wide as there is room. */
  fit(count) {
    for (const plot of this.plots) plot.setSize({ width: this.times * this.widthOf(count), height: this.times * this.height });
  }

  /** Adds a chart of columns, one of so many; `options` are uPlot's beside what all have. */
  add(title, label, count, columns, { cursor, ...options }) {
    const wrap = element("figure", "", [element("figcaption", title)], { class: "plot" });
    this.place.append(wrap);
    const all = {
      width: this.widthOf(count),
      height: this.height,
      legend: { show: false },
      cursor: { drag: { x: true, y: false, setScale: false, uni: 10 }, ...cursor },
      hooks: { setSelect: [(plot) => this.dragged(plot)], setCursor: [(plot) => this.point(plot)] },
      ...options,
    };
    const plot = new uPlot(this.times > 1 ? enlarged(all, this.times) : all, columns, wrap);
    plot.heading = title;
    plot.over.addEventListener("dblclick", () => this.zoomTo(null));
    plot.over.addEventListener("mouseleave", hideTip);
    plot.root.tabIndex = 0;
    plot.root.setAttribute("role", "application");
    plot.root.setAttribute("aria-roledescription", "chart");
    plot.root.setAttribute("aria-label", `${label}: arrow keys move the cursor, with Shift they mark what Enter zooms to, Escape shows all`);
    plot.root.addEventListener("keydown", (event) => this.key(plot, event));
    return plot;
  }

  dragged(plot) {
    if (plot.select.width < 8) return;
    const [min, max] = [plot.select.left, plot.select.left + plot.select.width].map((at) => plot.posToVal(at, "x"));
    this.zoomTo({ min, max }, plot);
  }

  zoomTo(range) {
    this.zoom = range;
    hideTip(); // another place lies under the pointer now
    for (const plot of this.plots) {
      const xs = plot.data[0];
      this.mark(plot, null);
      plot.setScale("x", range ?? { min: xs[0], max: xs.at(-1) });
    }
  }

  key(plot, event) {
    const xs = plot.data[0];
    const { min, max } = plot.scales.x;
    const [first, last] = [xs.findIndex((x) => x >= min), xs.findLastIndex((x) => x <= max)];
    const now = plot.cursor.idx ?? (event.key === "ArrowLeft" ? last + 1 : first - 1);
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -xs.length, End: xs.length }[event.key];
    if (event.key === "Escape") this.zoomTo(null);
    if (event.key === "Enter" && this.marked !== null) this.zoomTo(this.marked, plot);
    if (step === undefined) return;
    event.preventDefault();
    const index = Math.min(last, Math.max(first, now + step));
    plot.setCursor({ left: plot.valToPos(xs[index], "x"), top: plot.over.clientHeight / 3 });
    const said = this.lines(plot, index, null);
    const from = this.marking === plot ? this.from : null;
    this.mark(plot, event.shiftKey ? [from ?? Math.min(last, Math.max(first, now)), index] : null);
    this.readout.textContent = (this.marked === null ? said : [`from ${xs[this.from]} to ${xs[index]}: Enter zooms`, ...said]).join("; ");
  }

  /** Marks what lies between two places, which Enter zooms to; null: nothing. */
  mark(plot, places) {
    this.marking = plot;
    this.from = places === null ? null : places[0];
    const [min, max] = (places ?? [0, 0]).map((at) => plot.data[0][at]).sort((a, b) => a - b);
    this.marked = min === max ? null : { min, max };
    const [left, right] = this.marked === null ? [0, 0] : [min, max].map((x) => plot.valToPos(x, "x"));
    const height = this.marked === null ? 0 : plot.over.clientHeight;
    plot.setSelect({ left, top: 0, width: right - left, height }, false);
  }

  point(plot) {
    const { idx, left, top, event } = plot.cursor;
    if (!event || event.type !== "mousemove" || idx === null || idx === undefined || left < 0) return;
    if (event.target !== plot.over && !plot.over.contains(event.target)) return;
    showTip(event.clientX, event.clientY, this.lines(plot, idx, top));
  }

  /** A piece of a line, for what explains it. */
  stroke(stroke, dash) {
    const canvas = element("canvas", "", [], { class: "stroke", width: 48, height: 16, "aria-hidden": "true" });
    const pen = canvas.getContext("2d");
    pen.strokeStyle = stroke;
    pen.lineWidth = 4;
    pen.setLineDash(dash.map((length) => 2 * length));
    pen.beginPath();
    pen.moveTo(0, 8);
    pen.lineTo(48, 8);
    pen.stroke();
    return canvas;
  }

  /** All charts below each other, as far as they are zoomed, and below them [text, {stroke, dash}] of each line. */
  async png(key = []) {
    const zooms = this.plots.map(({ scales }) => ({ min: scales.x.min, max: scales.x.max }));
    const redraw = async (times) => {
      this.times = times;
      this.drawAll();
      this.plots.forEach((plot, index) => plot.setScale("x", zooms[index]));
      await null; // a chart is drawn when what asked for it is over, and before anybody sees it
    };
    const [before, times] = [this.times, Math.max(1, SAVED / devicePixelRatio)];
    if (times > 1) await redraw(times);
    const canvas = this.together(key, devicePixelRatio * times);
    if (times > 1) await redraw(before);
    return canvas;
  }

  together(key, scale) {
    const each = this.plots[0].ctx.canvas.height + 28 * scale;
    const wide = Math.max(...this.plots.map((plot) => plot.ctx.canvas.width));
    const high = this.plots.length * each + (key.length === 0 ? 0 : (key.length * 18 + 12) * scale);
    const share = Math.min(1, HIGHEST / high);
    const canvas = element("canvas", "", [], { width: Math.round(share * wide), height: Math.round(share * high) });
    const pen = canvas.getContext("2d");
    pen.scale(share, share);
    pen.fillStyle = colour("page");
    pen.fillRect(0, 0, wide, high);
    pen.font = `${13 * scale}px system-ui, sans-serif`;
    pen.fillStyle = colour("text");
    this.plots.forEach((plot, index) => {
      pen.fillText(plot.heading, 8 * scale, index * each + 18 * scale);
      pen.drawImage(plot.ctx.canvas, 0, index * each + 24 * scale);
    });
    key.forEach(([text, { stroke, dash }], index) => {
      const y = this.plots.length * each + (index * 18 + 10) * scale;
      pen.strokeStyle = stroke;
      pen.lineWidth = 2 * scale;
      pen.setLineDash(dash.map((length) => length * scale));
      pen.beginPath();
      pen.moveTo(8 * scale, y);
      pen.lineTo(36 * scale, y);
      pen.stroke();
      pen.fillText(fitted(pen, text, wide - 52 * scale), 44 * scale, y + 4 * scale);
    });
    return canvas;
  }
}
