// Curves of many trials over epochs, a chart for each metric: one cursor, one zoom, seeds as bands.
import { AROUND, Charts, axis, clear, heights } from "/static/charts.js";
import { short, telling, ticks } from "/static/numbers.js";
import { read } from "/static/paper.js";
import { element, isAway } from "/static/request.js";
import { csv, save } from "/static/save.js";
import { colour, fitted, isDark, palette, viridis } from "/static/theme.js";

const MOST_SAID = 12;
const POINTS = 300;
const FILED = 2000; // epochs of a trial in a file: as many as the API gives at once
const IN_TABLE = 10; // epochs in a line of the table behind a chart
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const PERCENT = new Set(["train_accuracy", "val_accuracy"]);
const TITLES = {
  val_accuracy: "validation accuracy (%)",
  train_accuracy: "training accuracy (%)",
  val_loss: "validation loss (nats)",
  train_loss: "training loss (nats)",
  ort_loss: "orthogonal loss",
  lr: "learning rate",
  seconds: "seconds per epoch",
  constraint_seconds: "seconds per epoch for the constraint",
};

/** What the epochs of these curves were measured on. */
export function measuredOn(curves) {
  const images = new Set(curves.map((curve) => curve.validated_on));
  if (images.size > 1) return "validation or test";
  return images.has("test") ? "test" : "validation";
}

function titleOf(metric, curves) {
  return (TITLES[metric] ?? metric).replace("validation", measuredOn(curves));
}

/** The colour and dashes of the line numbered so among so many. */
function style(index, count) {
  const colours = palette();
  if (count <= colours.length * DASHES.length) {
    return { stroke: colours[index % colours.length], dash: DASHES[Math.floor(index / colours.length)] };
  }
  const share = index / (count - 1);
  return { stroke: `rgb(${viridis(isDark() ? 0.25 + 0.75 * share : 0.85 * share).join(",")})`, dash: [] };
}

/** Exponential moving average with the bias of its beginning taken out; gaps stay. */
function smoothed(values, weight) {
  if (weight === 0) return values;
  let [mean, mass] = [0, 0];
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

/** Values between the points that there are, nothing beyond them. */
function filled(xs, values) {
  const known = xs.map((x, index) => index).filter((index) => values[index] !== null && values[index] !== undefined);
  const found = values.map((value) => value ?? null);
  for (let at = 1; at < known.length; at += 1) {
    const [from, to] = [known[at - 1], known[at]];
    for (let index = from + 1; index < to; index += 1) {
      const share = (xs[index] - xs[from]) / (xs[to] - xs[from]);
      found[index] = values[from] + share * (values[to] - values[from]);
    }
  }
  return found;
}

function spreadAt(columns, index) {
  const known = columns.map((column) => column[index]).filter((value) => value !== null && value !== undefined);
  if (known.length === 0) return [null, null, null];
  const mean = known.reduce((a, b) => a + b) / known.length;
  if (known.length === 1) return [mean, mean, mean];
  const deviation = Math.sqrt(known.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (known.length - 1));
  return [mean, mean - deviation, mean + deviation];
}

const isOfPage = ({ experiment_id: home }) => String(home) === document.body.dataset.experiment;
/** A trial's name: its number where it is of the page's experiment, else its id. */
const alone = (curve) => (isOfPage(curve) ? curve.number : curve.trial);

/**
 * Charts of curves in an element: one for each metric or, with `charts`, what these show: {title, metrics}. `sides` are
 * lines with names of their own, {name, trials, style}, in place of cells; `along` is what lies along x.
 */
export class CurveView extends Charts {
  constructor(figure, { charts = null, sides = null, along = "epoch" } = {}) {
    super(figure, { height: 264, wide: 1700 });
    this.legend = figure.querySelector(".lines");
    this.behind = figure.querySelector(".behind");
    this.behind?.addEventListener("toggle", () => this.write());
    this.fixed = charts;
    this.sides = sides;
    this.along = along;
    this.options = { smoothing: 0, log: false, bands: true };
    this.hidden = new Set(); // keys of lines
    this.data = null;
  }

  show(data) {
    this.data = data;
    this.draw();
  }

  set(option, value) {
    this.options[option] = value;
    this.draw();
  }

  /**
   * What is drawn as one line: trials of a cell together as a band, or each alone. Its `name` has what tells it from the
   * others, as a table's columns do: neither what these decide, nor where all are alike; its `whole` name has all that
   * differs. By its `key` it is known again among others.
   */
  groups() {
    const { curves, columns, decided } = this.data;
    if (this.sides !== null) return this.ofSides(curves);
    const groups = new Map();
    const homes = new Map(); // of each configuration the experiments that have it
    for (const curve of curves) {
      const key = this.options.bands ? `${curve.experiment_id} ${curve.cell}` : curve.trial;
      groups.set(key, [...(groups.get(key) ?? []), curve]);
      homes.set(curve.cell, (homes.get(curve.cell) ?? new Set()).add(curve.experiment_id));
    }
    const experiments = new Set(curves.map((curve) => curve.experiment_id)).size > 1;
    const seeds = new Set(curves.map((curve) => curve.seed)).size > 1;
    const say = new Map([...columns, ...decided].map(({ field }) => [field, telling(curves.map(({ fields }) => fields[field]))]));
    const elsewhere = (curve) => document.body.dataset.experiment !== undefined && !isOfPage(curve);
    return [...groups].map(([key, members]) => {
      const [{ experiment_id: home, cell, seed, fields }] = members;
      const words = (some) => some.map(({ field, name }) => `${name} ${say.get(field)(fields[field])}`);
      const named = (parts, seedSaid) => {
        const seeds = `${members.length} seeds`;
        if (members.length > 1) return parts.length > 0 ? `${parts.join(", ")} (${seeds})` : seeds;
        return [...parts, ...(seedSaid || parts.length === 0 ? [`seed ${seed}`] : [])].join(", ");
      };
      const from = (said) => (said ? [`experiment ${home}`] : []);
      return {
        key: String(key),
        name: named([...from(homes.get(cell).size > 1 || elsewhere(members[0])), ...words(columns)], seeds),
        whole: named([...from(experiments), ...words(columns), ...words(decided)], true),
        members,
      };
    });
  }

  /** The lines of sides, each in its side's colour; one without curves keeps its place. */
  ofSides(curves) {
    const members = this.sides.map(({ trials }) => curves.filter(({ trial }) => trials.includes(trial)));
    if (this.options.bands) return this.sides.map((side, index) => ({ ...side, key: `side ${index}`, index, members: members[index] }));
    return this.sides.flatMap((side, index) =>
      members[index].map((curve) => ({ ...side, key: `side ${index}, ${curve.trial}`, index, name: `${side.name}, seed ${curve.seed}`, members: [curve] })),
    );
  }

  /** The colour and dashes of a line. */
  styleOf(group, at, count) {
    return group.style?.() ?? (this.sides === null ? style(at, count) : style(group.index, this.sides.length));
  }

  charts() {
    return this.fixed ?? this.data.metrics.map((metric) => ({ title: titleOf(metric, this.data.curves), metrics: [metric] }));
  }

  /** The series of a chart over all epochs: {xs, lines: [{group, label, values, raw, low, high}]}. */
  table(chart) {
    const { curves, metrics } = this.data;
    const epochs = new Set();
    for (const curve of curves) for (const epoch of curve.epoch) epochs.add(epoch);
    const xs = [...epochs].sort((a, b) => a - b);
    const at = new Map(xs.map((x, index) => [x, index]));
    const column = (curve, metric) => {
      const values = new Array(xs.length).fill(null);
      const factor = PERCENT.has(metric) ? 100 : 1;
      const own = curve.values[metrics.indexOf(metric)] ?? [];
      own.forEach((value, index) => {
        if (value !== null) values[at.get(curve.epoch[index])] = value * factor;
      });
      return filled(xs, values);
    };
    const lines = [];
    this.groups().forEach((group, index) => {
      for (const metric of chart.metrics) {
        const columns = group.members.map((curve) => column(curve, metric));
        if (columns.every((values) => values.every((value) => value === null))) continue;
        const alone = this.fixed === null ? group.name : chart.title;
        const label = chart.metrics.length > 1 ? (chart.labels?.[metric] ?? metric) : alone;
        const spreads = columns.length > 1 ? xs.map((_, row) => spreadAt(columns, row)) : null;
        const raw = spreads ? spreads.map(([mean]) => mean) : columns[0];
        const weight = this.options.smoothing;
        lines.push({
          group: index,
          key: group.key,
          label,
          raw,
          spread: spreads && spreads.map(([mean, , high]) => (high === null || high === mean ? null : high - mean)),
          values: smoothed(raw, weight),
          low: spreads && smoothed(spreads.map(([, low]) => low), weight),
          high: spreads && smoothed(spreads.map(([, , high]) => high), weight),
        });
      }
    });
    return this.along === "epoch" ? { xs, lines } : this.trimmed(xs, lines);
  }

  /** Only the places at which a chart has values: what is no epoch has another range in each. */
  trimmed(xs, lines) {
    const kept = xs.map((_, at) => at).filter((at) => lines.some(({ raw }) => raw[at] !== null));
    const of = (values) => values && kept.map((at) => values[at]);
    const own = lines.map((line) => ({ ...line, raw: of(line.raw), spread: of(line.spread), values: of(line.values), low: of(line.low), high: of(line.high) }));
    return { xs: of(xs), lines: own };
  }

  drawAll() {
    if (this.data === null) return;
    this.empty();
    const groups = this.groups();
    const count = groups.length;
    for (const chart of this.charts()) {
      const { xs, lines } = this.table(chart);
      if (lines.length === 0) continue;
      const styles = lines.map((line, index) =>
        chart.metrics.length > 1 ? style(index, chart.metrics.length) : this.styleOf(groups[line.group], line.group, count),
      );
      this.plots.push(this.plot(chart, xs, lines, styles));
    }
    this.place.classList.toggle("single", this.plots.length === 1);
    this.drawLegend();
    this.write();
    this.figure.dataset.drawn = String(this.plots.length);
  }

  plot(chart, xs, lines, styles) {
    const columns = [xs];
    const series = [{}];
    const bands = [];
    const faint = this.options.smoothing > 0;
    // A logarithm has no place for what is not above zero.
    const log = (this.options.log || chart.log) && lines.some((line) => line.values.some((value) => value > 0));
    const kept = (values) => (log ? values.map((value) => (value > 0 ? value : null)) : values);
    const lonely = xs.length <= 60;
    lines.forEach((line, index) => {
      const { stroke, dash } = styles[index];
      const shown = !this.hidden.has(line.key);
      if (line.low) {
        columns.push(kept(line.high), kept(line.low));
        series.push({ show: shown, stroke: "transparent", width: 0, points: { show: false } });
        series.push({ show: shown, stroke: "transparent", width: 0, points: { show: false } });
        bands.push({ series: [columns.length - 2, columns.length - 1], fill: clear(stroke, lines.length > 6 ? 0.1 : 0.16) });
      }
      if (faint) {
        columns.push(kept(line.raw));
        series.push({ show: shown, stroke: clear(stroke, 0.28), width: 1, points: { show: false }, spanGaps: true });
      }
      line.at = columns.length;
      columns.push(kept(line.values));
      series.push({
        show: shown,
        label: line.label,
        stroke,
        dash,
        width: 2,
        spanGaps: true,
        points: { show: lonely && lines.length <= 4 && dash.length === 0, size: 5, fill: stroke },
      });
    });
    const ten = (value) => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-9;
    const only = (plot, splits) => {
      const kept = splits.map((split) => (split !== null && ten(split) ? split : null));
      return kept.filter((split) => split !== null).length > 1 ? kept : splits;
    };
    const tens = { filter: only, grid: { ...axis().grid, filter: only } };
    const { scale, beside } = heights(columns.slice(1), log);
    const options = {
      cursor: {
        ...(this.along === "epoch" ? { sync: { key: "curves", setSeries: false } } : {}),
        points: { size: 7 },
        // The edges of bands are lines, too, of which nobody sees that they are meant: all others would fade.
        focus: { prox: 24, dist: (_, which, __, at, pointer) => (lines.some((line) => line.at === which) ? at - pointer : Infinity) },
      },
      scales: { x: AROUND, y: scale },
      axes: [
        { ...axis(this.along), size: 34, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 1e4, 1e5, 1e6], values: (_, ticks) => ticks.map((tick) => (Number.isInteger(tick) ? String(tick) : "")) },
        { ...axis(), size: 62, ...(log ? tens : {}), ...beside, values: (_, splits) => ticks(splits) },
      ],
      series,
      bands,
    };
    const label = `${chart.title} over ${this.along === "epoch" ? "epochs" : this.along}, ${lines.length} lines`;
    const title = log ? `${chart.title}, logarithmic` : chart.title;
    const plot = this.add(title, label, this.charts().length, columns, options);
    return Object.assign(plot, { lines, chart, styles, log });
  }

  /** Epochs are one for all charts; of what else lies along x each has a range of its own. */
  zoomTo(range, plot = null) {
    if (plot !== null && this.along !== "epoch") {
      this.mark(plot, null);
      plot.setScale("x", range);
      return;
    }
    super.zoomTo(range);
    this.figure.dataset.zoomed = range === null ? "" : "x";
  }

  /** What is said at an epoch: the lines nearest to the pointer, or the first. */
  lines(plot, index, near) {
    const found = plot.lines
      .filter((line) => !this.hidden.has(line.key))
      .map((line) => ({ line, value: line.values[index], high: line.high?.[index] }))
      .filter(({ value }) => value !== null && value !== undefined);
    if (near !== null) {
      const pixels = (value) => (plot.log && !(value > 0) ? Infinity : Math.abs(plot.valToPos(value, "y") - near));
      found.sort((a, b) => pixels(a.value) - pixels(b.value));
    }
    const said = found.slice(0, MOST_SAID).map(({ line, value, high }) => {
      const spread = high === null || high === undefined || high === value ? "" : ` ± ${short(high - value)}`;
      return `${short(value)}${spread}  ${line.label}`;
    });
    const more = found.length - said.length;
    return [`${this.along} ${plot.data[0][index]}`, ...said, more > 0 ? `and ${more} more` : ""];
  }

  /** What the lines that are drawn mean: [text, {stroke, dash}, whole text] of each. */
  meanings() {
    if (this.fixed !== null) {
      const several = this.plots.filter((plot) => plot.lines.length > 1);
      return [...new Map(several.flatMap((plot) => plot.lines.map((line, index) => [line.label, plot.styles[index]])))];
    }
    const groups = this.groups();
    return groups
      .map((group, index) => ({ group, index }))
      .filter(({ group }) => group.members.length > 0 && !this.hidden.has(group.key))
      .map(({ group, index }) => [group.name, this.styleOf(group, index, groups.length), group.whole ?? group.name]);
  }

  drawLegend() {
    const groups = this.groups();
    if (this.fixed !== null) {
      this.legend.replaceChildren(
        ...this.meanings().map(([label, { stroke, dash }]) => element("span", "", [this.stroke(stroke, dash), label], { class: "key" })),
      );
      return;
    }
    const nameOf = (one) => one.dataset.line ?? one.getAttribute("href");
    const held = this.legend.contains(document.activeElement) ? nameOf(document.activeElement) : null;
    const buttons = groups.map((group, index) => {
      if (group.members.length === 0) return "";
      const { stroke, dash } = this.styleOf(group, index, groups.length);
      const button = element("button", "", [this.stroke(stroke, dash), element("span", group.name, [], { dir: "auto" })], {
        type: "button",
        class: "line",
        title: group.whole ?? group.name,
        "aria-pressed": String(!this.hidden.has(group.key)),
        "data-line": group.key,
      });
      button.addEventListener("click", () => {
        if (!this.hidden.delete(group.key)) this.hidden.add(group.key);
        this.draw();
      });
      if (this.along !== "epoch") return element("li", "", [button]);
      const trials = element("a", group.members.length > 1 ? "trials" : `trial ${alone(group.members[0])}`, [], {
        href: group.members.length > 1 ? `/trials/${group.members[0].trial}/cell` : `/trials/${group.members[0].trial}`,
      });
      return element("li", "", [button, trials]);
    });
    this.legend.replaceChildren(...buttons);
    if (held !== null) [...this.legend.querySelectorAll("button, a")].find((one) => nameOf(one) === held)?.focus({ preventScroll: true });
  }

  /** The tables behind the charts, where they are to be seen: some epochs, as no table has room for all. */
  write() {
    if (!this.behind?.open) return;
    const tables = this.plots.map((plot) => {
      const xs = plot.data[0];
      const last = xs.length - 1;
      const count = Math.min(IN_TABLE, xs.length);
      const shown = Array.from({ length: count }, (_, at) => (count === 1 ? 0 : Math.round((at / (count - 1)) * last)));
      const cell = (line, at) => {
        const [value, high] = [line.raw[at], line.spread?.[at] ?? null];
        if (value === null || value === undefined) return "–";
        return high === null ? short(value) : `${short(value)} ± ${short(high)}`;
      };
      const heads = shown.map((at) => element("th", String(xs[at]), [], { scope: "col", class: "number" }));
      const rows = plot.lines.map((line) =>
        element("tr", "", [
          element("th", line.label, [], { scope: "row", dir: "auto" }),
          ...shown.map((at) => element("td", cell(line, at), [], { class: "number" })),
        ]),
      );
      const table = element("table", "", [
        element("caption", plot.chart.title),
        element("thead", "", [element("tr", "", [element("th", this.along, [], { scope: "col" }), ...heads])]),
        element("tbody", "", rows),
      ], { class: "rows" });
      const label = `${plot.chart.title}, at some of the ${this.along === "epoch" ? "epochs" : "places"}`;
      return element("div", "", [table], { class: "wide", tabindex: "0", role: "region", "aria-label": label });
    });
    this.behind.querySelector(".tables").replaceChildren(...tables);
  }

  /** Saves what is shown as a file; a table has the epochs, too, that charts leave out. */
  async save(kind, name, query) {
    if (kind === "png") return save(`${name}.png`, this.png());
    if (kind === "svg") return save(`${name}.svg`, this.svg(), "image/svg+xml");
    const cut = ({ curves }, most) => curves.some(({ epoch }) => epoch.length >= most && epoch.length < epoch.at(-1));
    try {
      const data = cut(this.data, POINTS) ? await readCurves(query, FILED) : this.data;
      if (cut(data, FILED)) this.readout.textContent = `Of trials with more than ${FILED} epochs the file has so many.`;
      return save(`${name}.csv`, this.csv(data), "text/csv");
    } catch (error) {
      this.readout.textContent = error.message;
    }
  }

  /** The epochs of curves, as they are. */
  csv(data = this.data) {
    const { curves, metrics } = data;
    const columns = [...data.columns, ...data.decided];
    const rows = [["trial", "experiment", "number", "seed", "state", ...columns.map(({ field }) => field), this.along, ...metrics]];
    for (const curve of curves) {
      const fixed = [curve.trial, curve.experiment_id, curve.number, curve.seed, curve.state];
      const own = columns.map(({ field }) => {
        const value = curve.fields[field] ?? null;
        return value !== null && typeof value === "object" ? JSON.stringify(value) : value;
      });
      curve.epoch.forEach((epoch, index) => rows.push([...fixed, ...own, epoch, ...curve.values.map((values) => values[index])]));
    }
    return csv(rows);
  }

  png() {
    return super.png(this.meanings().slice(0, 60));
  }

  svg() {
    const escape = (text) => String(text).replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
    const parts = [];
    let top = 0;
    let wide = 0;
    for (const plot of this.plots) {
      const [left, width, height] = [plot.over.offsetLeft, plot.over.clientWidth, plot.over.clientHeight];
      const [shift, id] = [top + 28 + plot.over.offsetTop, `clip${top}`];
      wide = Math.max(wide, plot.width);
      parts.push(`<text x="8" y="${top + 18}" fill="${colour("text")}" font-size="13">${escape(plot.heading)}</text>`);
      parts.push(`<g transform="translate(${left} ${shift})"><clipPath id="${id}"><rect width="${width}" height="${height}"/></clipPath>`);
      for (const [which, scale] of [[0, "x"], [1, "y"]]) {
        const { _splits: splits, _values: values } = plot.axes[which];
        (splits ?? []).forEach((split, index) => {
          const text = values[index];
          if (split === null || text === "" || text === null || text === undefined) return;
          const at = plot.valToPos(split, scale).toFixed(1);
          const line = scale === "x" ? `x1="${at}" x2="${at}" y1="0" y2="${height}"` : `x1="0" x2="${width}" y1="${at}" y2="${at}"`;
          const where = scale === "x" ? `x="${at}" y="${height + 18}" text-anchor="middle"` : `x="-8" y="${Number(at) + 4}" text-anchor="end"`;
          parts.push(`<line ${line} stroke="${colour("grid")}"/><text ${where} fill="${colour("quiet")}" font-size="12">${escape(text)}</text>`);
        });
      }
      parts.push(`<text x="${width / 2}" y="${height + 38}" text-anchor="middle" fill="${colour("quiet")}" font-size="12">${escape(this.along)}</text>`);
      parts.push(`<g clip-path="url(#${id})" fill="none" stroke-linejoin="round">`);
      const path = (values) => {
        let pen = "M";
        let text = "";
        values.forEach((value, index) => {
          if (value === null || value === undefined || (plot.log && !(value > 0))) {
            pen = "M";
            return;
          }
          text += `${pen}${plot.valToPos(plot.data[0][index], "x").toFixed(1)} ${plot.valToPos(value, "y").toFixed(1)}`;
          pen = "L";
        });
        return text;
      };
      plot.lines.forEach((line, index) => {
        if (this.hidden.has(line.key)) return;
        const { stroke, dash } = plot.styles[index];
        if (line.low) {
          const back = [...line.low].reverse();
          const xs = [...plot.data[0]].reverse();
          const known = back.map((value, at) => [value, xs[at]]).filter(([value]) => value !== null && !(plot.log && !(value > 0)));
          const down = known.map(([value, x]) => `L${plot.valToPos(x, "x").toFixed(1)} ${plot.valToPos(value, "y").toFixed(1)}`).join("");
          parts.push(`<path d="${path(line.high).replace(/(?!^)M/g, "L")}${down}Z" fill="${stroke}" fill-opacity="0.14"/>`);
        }
        if (this.options.smoothing > 0) parts.push(`<path d="${path(line.raw)}" stroke="${stroke}" stroke-opacity="0.28"/>`);
        parts.push(`<path d="${path(line.values)}" stroke="${stroke}" stroke-width="2" stroke-dasharray="${dash.join(" ")}"><title>${escape(line.label)}</title></path>`);
      });
      parts.push("</g></g>");
      top += plot.height + 28;
    }
    const pen = document.createElement("canvas").getContext("2d");
    pen.font = "12px system-ui, sans-serif";
    for (const [text, { stroke, dash }, whole = text] of this.meanings()) {
      parts.push(`<line x1="8" x2="36" y1="${top + 10}" y2="${top + 10}" stroke="${stroke}" stroke-width="2" stroke-dasharray="${dash.join(" ")}"/>`);
      parts.push(`<text x="44" y="${top + 14}" fill="${colour("text")}" font-size="12">${escape(fitted(pen, text, wide - 52))}<title>${escape(whole)}</title></text>`);
      top += 18;
    }
    const size = `width="${wide}" height="${top + 12}" viewBox="0 0 ${wide} ${top + 12}"`;
    return `<svg xmlns="http://www.w3.org/2000/svg" ${size} font-family="system-ui, sans-serif"><rect width="100%" height="100%" fill="${colour("page")}"/>${parts.join("")}</svg>`;
  }
}

/** Reads curves, or says why there are none to be had now; where the service is `away` they may be soon. */
export async function readCurves(query, points = POINTS) {
  const { status, answer } = await read(`/v1/curves?points=${points}&${query}`);
  if (status === 200) return answer;
  const words = status === 0 ? "The service does not answer. Does it run?" : (answer?.detail ?? "The service refused.");
  throw Object.assign(new Error(words), { away: isAway({ status }) });
}
