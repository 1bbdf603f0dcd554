// Lines over time or epochs with bands and levels: a chart for each quantity, one cursor and one zoom over all.
import { AROUND, Charts, axis, heights } from "/static/charts.js";
import { short, ticks } from "/static/numbers.js";

/**
 * Charts in a figure. `make()` gives them, anew for each scheme: {title, xs, series: [{label, values, stroke, width,
 * dash}], bands: [{between: [i, j], fill}], log, whole, from, points}; `whole` xs are counts,
 * `from` is where the axis begins, and `points` false leaves the dots of lines out. `along` stands below each.
 */
export class LineCharts extends Charts {
  constructor(figure, { say, key, along }) {
    super(figure, { height: 224, wide: 1350 });
    this.say = say;
    this.along = along;
    this.sync = key;
    this.make = null;
  }

  show(make) {
    this.make = make;
    this.draw();
  }

  drawAll() {
    if (this.make === null) return;
    this.empty();
    const charts = this.make();
    this.plots = charts.map((chart) => this.plot(chart, charts.length));
    this.place.classList.toggle("single", this.plots.length === 1);
    this.figure.dataset.drawn = String(this.plots.length);
  }

  plot(chart, count) {
    const kept = (values) => (chart.log ? values.map((value) => (value > 0 ? value : null)) : values);
    const columns = [chart.xs, ...chart.series.map(({ values }) => kept(values))];
    const lonely = chart.xs.length <= 40;
    const { scale, beside } = heights(columns.slice(1), chart.log);
    const options = {
      cursor: { sync: { key: this.sync, setSeries: false }, points: { size: 6 } },
      scales: {
        x: AROUND,
        y: { ...scale, ...(chart.from === undefined ? {} : { range: (_, low, high) => [chart.from, high > chart.from ? high * 1.05 : chart.from + 1] }) },
      },
      axes: [
        { ...axis(this.along), size: 34, ...(chart.whole ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000, 1e4, 1e5] } : {}), values: (_, splits) => ticks(splits) },
        { ...axis(), size: 62, ...beside, values: (_, splits) => ticks(splits) },
      ],
      series: [
        {},
        ...chart.series.map(({ stroke, width = 2, dash = [], label }) => ({
          stroke: stroke ?? "transparent",
          width,
          dash,
          spanGaps: true,
          // Of a single place there is nothing but a dot.
          points: { show: lonely && (chart.points !== false || chart.xs.length === 1) && Boolean(label), size: 5, fill: stroke },
        })),
      ],
      bands: (chart.bands ?? []).map(({ between: [high, low], fill }) => ({ series: [high + 1, low + 1], fill })),
    };
    const plot = this.add(chart.log ? `${chart.title}, logarithmic` : chart.title, chart.title, count, columns, options);
    plot.chart = chart;
    return plot;
  }

  lines({ chart }, index) {
    const said = chart.series
      .filter(({ label, values }) => label && values[index] !== null && values[index] !== undefined)
      .map(({ label, values }) => `${short(values[index])}  ${label}`);
    return [this.say(chart.xs[index]), ...said];
  }
}
