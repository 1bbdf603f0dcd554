// Lines over time or epochs with bands and levels: a chart for each quantity, one cursor and one zoom over all.
import uPlot from "/static/lib/uplot.js";
import { element } from "/static/request.js";
import { colour, onScheme } from "/static/theme.js";
import { hideTip, showTip } from "/static/tip.js";

const HEIGHT = 210;

/** A number as it stands beside an axis. */
export function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2).replace("e+", "e") : String(Number(value.toPrecision(4)));
}

/** A colour of six digits, see-through. */
export function clear(hex, alpha) {
  return `rgba(${[1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)).join(",")},${alpha})`;
}

/**
 * Charts in a figure. `make()` gives them, anew for each scheme: {title, xs, series: [{label, values, stroke, width,
 * dash}], bands: [{between: [i, j], fill}], log, whole, from, points}; `whole` xs are counts,
 * `from` is where the axis begins, and `points` false leaves the dots out.
 */
export class LineCharts {
  constructor(figure, { say, key }) {
    this.figure = figure;
    this.place = figure.querySelector(".charts-live");
    this.readout = figure.querySelector(".readout");
    this.say = say;
    this.sync = key;
    this.make = null;
    this.plots = [];
    onScheme(() => this.make !== null && this.draw());
    let width = 0;
    new ResizeObserver(() => {
      if (this.place.clientWidth === width || this.place.clientWidth === 0) return;
      const first = width === 0;
      width = this.place.clientWidth;
      if (first && this.make !== null) this.draw();
      else for (const plot of this.plots) plot.setSize({ width: this.widthOf(), height: HEIGHT });
    }).observe(this.place);
  }

  show(make) {
    this.make = make;
    this.draw();
  }

  draw() {
    if (this.place.clientWidth === 0) return;
    for (const plot of this.plots) plot.destroy();
    this.place.replaceChildren();
    hideTip();
    this.charts = this.make();
    this.plots = this.charts.map((chart) => this.plot(chart));
    this.place.classList.toggle("single", this.plots.length === 1);
    this.figure.dataset.drawn = String(this.plots.length);
  }

  widthOf() {
    const room = this.place.clientWidth;
    const columns = this.charts.length > 1 && room >= 900 ? (this.charts.length > 2 && room >= 1350 ? 3 : 2) : 1;
    return Math.floor((room - (columns - 1) * 16) / columns);
  }

  plot(chart) {
    const grid = { stroke: colour("quiet"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const kept = (values) => (chart.log ? values.map((value) => (value > 0 ? value : null)) : values);
    const wrap = element("figure", "", [element("figcaption", chart.title)], { class: "plot" });
    this.place.append(wrap);
    const lonely = chart.xs.length <= 40;
    const options = {
      width: this.widthOf(),
      height: HEIGHT,
      cursor: {
        sync: { key: this.sync, setSeries: false },
        drag: { x: true, y: false, setScale: false, uni: 10 },
        points: { size: 6 },
      },
      legend: { show: false },
      scales: {
        x: { time: false, range: (_, low, high) => (low === high ? [low - 0.5, high + 0.5] : [low, high]) },
        y: { distr: chart.log ? 3 : 1, ...(chart.from === undefined ? {} : { range: (_, low, high) => [chart.from, Math.max(high * 1.05, chart.least ?? 0)] }) },
      },
      axes: [
        { ...grid, size: 34, ...(chart.whole ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 1e4, 1e5] } : {}), values: (_, ticks) => ticks.map(short) },
        { ...grid, size: 62, values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : short(tick))) },
      ],
      series: [
        {},
        ...chart.series.map(({ stroke, width = 2, dash = [], label }) => ({
          stroke: stroke ?? "transparent",
          width,
          dash,
          spanGaps: true,
          points: { show: lonely && chart.points !== false && Boolean(label), size: 5, fill: stroke },
        })),
      ],
      bands: (chart.bands ?? []).map(({ between: [high, low], fill }) => ({ series: [high + 1, low + 1], fill })),
      hooks: {
        setSelect: [
          (plot) => {
            if (plot.select.width < 8) return;
            const [low, high] = [plot.select.left, plot.select.left + plot.select.width].map((at) => plot.posToVal(at, "x"));
            plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
            this.zoomTo({ min: low, max: high });
          },
        ],
        setCursor: [(plot) => this.point(plot, chart)],
      },
    };
    const plot = new uPlot(options, [chart.xs, ...chart.series.map(({ values }) => kept(values))], wrap);
    plot.over.addEventListener("dblclick", () => this.zoomTo(null));
    plot.over.addEventListener("mouseleave", hideTip);
    plot.root.tabIndex = 0;
    plot.root.setAttribute("role", "application");
    plot.root.setAttribute("aria-roledescription", "chart");
    plot.root.setAttribute("aria-label", `${chart.title}: arrow keys move the cursor`);
    plot.root.addEventListener("keydown", (event) => this.key(plot, chart, event));
    return plot;
  }

  zoomTo(range) {
    for (const plot of this.plots) {
      const xs = plot.data[0];
      plot.setScale("x", range ?? { min: xs[0], max: xs.at(-1) });
    }
  }

  lines(chart, index) {
    const said = chart.series
      .filter(({ label, values }) => label && values[index] !== null && values[index] !== undefined)
      .map(({ label, values }) => `${short(values[index])}  ${label}`);
    return [this.say(chart.xs[index]), ...said];
  }

  key(plot, chart, event) {
    const xs = chart.xs;
    const now = plot.cursor.idx ?? (event.key === "ArrowLeft" ? xs.length : -1);
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -xs.length, End: xs.length }[event.key];
    if (event.key === "Escape") this.zoomTo(null);
    if (step === undefined) return;
    event.preventDefault();
    const index = Math.min(xs.length - 1, Math.max(0, now + step));
    plot.setCursor({ left: plot.valToPos(xs[index], "x"), top: plot.over.clientHeight / 3 });
    this.readout.textContent = this.lines(chart, index).join("; ");
  }

  point(plot, chart) {
    const { idx, left, event } = plot.cursor;
    if (!event || event.type !== "mousemove" || idx === null || idx === undefined || left < 0) return;
    if (event.target !== plot.over && !plot.over.contains(event.target)) return;
    showTip(event.clientX, event.clientY, this.lines(chart, idx));
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

  /** All charts below each other, as they are on the screen. */
  png() {
    const scale = devicePixelRatio;
    const each = this.plots[0].ctx.canvas.height + 28 * scale;
    const canvas = document.createElement("canvas");
    canvas.width = Math.max(...this.plots.map((plot) => plot.ctx.canvas.width));
    canvas.height = this.plots.length * each;
    const pen = canvas.getContext("2d");
    pen.fillStyle = colour("page");
    pen.fillRect(0, 0, canvas.width, canvas.height);
    pen.font = `${13 * scale}px system-ui, sans-serif`;
    this.plots.forEach((plot, index) => {
      pen.fillStyle = colour("text");
      pen.fillText(this.charts[index].title, 8 * scale, index * each + 18 * scale);
      pen.drawImage(plot.ctx.canvas, 0, index * each + 24 * scale);
    });
    return canvas;
  }
}
