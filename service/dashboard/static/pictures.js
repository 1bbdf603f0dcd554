// Pictures of what was measured of a network: places, marks and bars that are hovered and walked over by keys.
import { inDigits, short, tick } from "/static/numbers.js";
import { onSheet } from "/static/paper.js";
import { csv, save } from "/static/save.js";
import { colour, onScheme, palette, readable, sharp, viridis } from "/static/theme.js";
import { hideTip, showTip } from "/static/tip.js";

const FONT = "system-ui, sans-serif";
const percent = (value) => `${inDigits(100 * value, 1)} %`;
const spoken = (name) => name.replaceAll("_", " ");

let library = null;
let coming = null;

/** Loads what pictures are drawn with: when the first is to be seen, or before, as paper waits for nothing. */
export function load() {
  coming ??= import("/static/lib/echarts.js").then((found) => {
    library = found;
  });
  return coming;
}

/** A figure whose `kind` says how data are drawn. */
export class Picture {
  constructor(figure, kind, name) {
    this.figure = figure;
    this.kind = kind;
    this.name = name;
    this.place = figure.querySelector(".canvas");
    this.readout = figure.querySelector(".readout");
    this.data = null;
    this.chart = null;
    this.at = -1;
    this.width = 0;
    onScheme(() => this.data !== null && this.draw());
    new ResizeObserver(() => {
      const width = this.place.clientWidth;
      if (this.data !== null && width !== this.width && width !== 0) this.draw();
    }).observe(this.place);
    this.place.addEventListener("keydown", (event) => this.key(event));
    this.place.addEventListener("blur", () => this.mark(-1));
    figure.addEventListener("click", (event) => this.save(event.target.closest("button[data-save]")?.dataset.save));
  }

  /** Draws data; null where there is nothing to be drawn. */
  async show(data) {
    this.figure.hidden = data === null;
    if (data === null) return;
    if (library === null) await load();
    this.init = library.init;
    this.data = data;
    this.draw();
  }

  /** Draws it; where it is not to be seen now, once it is. */
  draw() {
    this.width = this.place.clientWidth;
    if (this.width === 0) return;
    const drawn = this.kind(this.data, this.width);
    this.items = drawn.items;
    this.columns = drawn.columns ?? 1;
    this.rows = drawn.rows;
    this.drawn = drawn;
    this.place.style.height = `${drawn.height}px`;
    this.chart = sharp(this.chart);
    if (this.chart === null) {
      this.chart = this.init(this.place, null, { renderer: "canvas", devicePixelRatio });
      this.chart.on("mousemove", ({ seriesId, dataIndex, event }) => {
        const item = this.items.find((one) => one.series === seriesId && one.index === dataIndex);
        if (item) showTip(event.event.clientX, event.event.clientY, item.lines);
        else hideTip();
      });
      this.chart.on("mouseout", hideTip);
      this.chart.on("globalout", hideTip);
    } else {
      this.chart.resize({ width: this.width, height: drawn.height });
    }
    this.chart.setOption({ animation: false, ...drawn.option }, { notMerge: true });
    onSheet(this.place, this.chart);
    this.figure.dataset.drawn = String(this.items.length);
  }

  key(event) {
    if (this.data === null || event.ctrlKey || event.metaKey || event.altKey) return;
    const last = this.items.length - 1;
    const step = {
      ArrowRight: 1,
      ArrowLeft: -1,
      ArrowDown: this.columns > 1 ? this.columns : 1,
      ArrowUp: this.columns > 1 ? -this.columns : -1,
      Home: -this.items.length,
      End: this.items.length,
    }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const next = this.at >= 0 ? this.at + step : event.key === "End" ? last : 0;
    this.mark(this.columns > 1 && (next < 0 || next > last) && Math.abs(step) === this.columns ? this.at : Math.min(last, Math.max(0, next)));
  }

  /** Puts the cursor on an item: it is outlined, and said. */
  mark(index) {
    if (this.chart === null) return;
    if (this.at >= 0) this.emphasize("downplay", this.at);
    this.at = index;
    if (index < 0) return;
    this.emphasize("highlight", index);
    this.readout.textContent = this.items[index].lines.filter(Boolean).join("; ");
  }

  emphasize(type, index) {
    const { series, index: dataIndex } = this.items[index] ?? {};
    if (series !== undefined) this.chart.dispatchAction({ type, seriesId: series, dataIndex });
  }

  save(kind) {
    if (!kind || this.data === null) return;
    if (kind === "csv") save(`${this.name}.csv`, csv(this.rows), "text/csv");
    else if (kind === "png") save(`${this.name}.png`, this.chart.renderToCanvas({ pixelRatio: 2, backgroundColor: colour("page") }));
    else {
      const aside = this.init(null, null, { renderer: "svg", ssr: true, width: this.place.clientWidth, height: this.drawn.height });
      aside.setOption({ animation: false, ...this.drawn.option, backgroundColor: colour("page") });
      save(`${this.name}.svg`, aside.renderToSVGString(), "image/svg+xml");
      aside.dispose();
    }
  }
}

function axis(name, more) {
  return {
    type: "value",
    name,
    nameLocation: "middle",
    nameGap: 30,
    nameTextStyle: { color: colour("text"), fontFamily: FONT, fontSize: 12 },
    axisLabel: { color: colour("quiet"), fontFamily: FONT, fontSize: 12, hideOverlap: true, formatter: tick, ...(more.max !== undefined && more.max !== 100 ? { showMaxLabel: false } : {}) },
    axisLine: { lineStyle: { color: colour("grid") } },
    axisTick: { show: false },
    splitLine: { lineStyle: { color: colour("grid") } },
    ...more,
  };
}

let pen = null;

/** How wide a text is. */
function wideness(text) {
  pen ??= document.createElement("canvas").getContext("2d");
  pen.font = `12px ${FONT}`;
  return pen.measureText(text).width;
}

/** Parts in as few lines as fit so wide a room, {text, wide} each; `between` stands between parts of a line. */
function inLines(parts, between, width) {
  const lines = [];
  let [line, at] = [[], 0];
  for (const { text, wide } of parts) {
    const more = wide + (line.length > 0 ? wideness(between) : 0);
    if (line.length > 0 && at + more > width) {
      lines.push(line.join(between));
      [line, at] = [[], 0];
    }
    at += line.length > 0 ? more : wide;
    line.push(text);
  }
  return [...lines, line.join(between)];
}

/** Words in lines of a width. */
const wrapped = (text, width) => inLines(text.split(" ").map((word) => ({ text: word, wide: wideness(word) })), " ", width);

const LINE = 18;
const OWN = { outerBoundsMode: "none" }; // where a grid stands is what is said of it, whatever its axes' names are

/** Values of a logarithmic axis from one to another: 1, 2 and 5 times powers of ten, or these alone where they are many. */
function decades(low, top) {
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(top); power += 1) {
    for (const digit of Math.log10(top / low) > 4 ? [1] : [1, 2, 5]) found.push(Number(`${digit}e${power}`));
  }
  return found.filter((value) => value >= low && value <= top);
}

/** A custom series of shapes; `shape(api, value)` gives what is drawn of an item, outlined where it is chosen. */
function shapes(id, data, shape, more = {}) {
  const outlined = { style: { stroke: colour("text"), lineWidth: 2 } };
  return {
    id,
    type: "custom",
    progressive: 0,
    data,
    renderItem: (params, api) => {
      const made = shape(api, params.dataIndex);
      const children = made.children ?? [made];
      for (const child of children) if (child.type !== "text") child.emphasis = outlined;
      return made;
    },
    ...more,
  };
}

/** A line across a chart, with words at its end. */
function level(id, from, to, words, role, dash = [6, 4], { above = false, ...more } = {}) {
  return {
    id,
    type: "custom",
    silent: true,
    z: 8,
    data: [[...from, ...to]],
    renderItem: (params, api) => {
      let [x1, y1] = api.coord([api.value(0), api.value(1)]);
      let [x2, y2] = api.coord([api.value(2), api.value(3)]);
      if (above) [y1, y2] = [params.coordSys.y, params.coordSys.y + params.coordSys.height]; // rows have no edges
      const upright = Math.abs(x1 - x2) < 1;
      const right = x2 > params.coordSys.x + params.coordSys.width * 0.6;
      const text = above
        ? { x: x2, y: Math.min(y1, y2) - 4, align: "center", verticalAlign: "bottom" }
        : upright
          ? { x: x2 + (right ? -6 : 6), y: Math.min(y1, y2) + 4, align: right ? "right" : "left", verticalAlign: "top" }
          : { x: Math.max(x1, x2) - 4, y: y2 - 4, align: "right", verticalAlign: "bottom" };
      return {
        type: "group",
        children: [
          { type: "line", shape: { x1, y1, x2, y2 }, style: { stroke: colour(role), lineWidth: 2, lineDash: dash } },
          { type: "text", style: { text: words, ...text, fill: colour(role), font: `12px ${FONT}`, stroke: colour("page"), lineWidth: 3 } },
        ],
      };
    },
    ...more,
  };
}

const rectangle = (a, b, inset = 0.5) => ({
  x: Math.min(a[0], b[0]) + inset,
  y: Math.min(a[1], b[1]),
  width: Math.max(0.5, Math.abs(a[0] - b[0]) - 2 * inset),
  height: Math.abs(a[1] - b[1]),
});

/** Accuracy by kind of corruption and severity. */
export function corruptions({ table, mean }, width) {
  const kinds = Object.keys(table);
  const columns = Math.min(...kinds.map((kind) => table[kind].length));
  const severities = Array.from({ length: columns }, (_, index) => index + 1);
  const all = kinds.flatMap((kind) => table[kind]);
  const [low, top] = [Math.min(...all), Math.max(...all)];
  const items = [];
  const data = [];
  kinds.forEach((kind, row) => {
    severities.forEach((severity, column) => {
      const value = table[kind][column];
      items.push({ series: "places", index: data.length, lines: [`${spoken(kind)}, severity ${severity}`, `accuracy ${percent(value)}`] });
      data.push([column, row, value]);
    });
  });
  const [left, high, wide] = [130, 24, Math.min(width - 138, 560)];
  const said = wrapped(`from ${percent(low)} (dark) to ${percent(top)} (bright), ${percent(mean)} on average`, width - 8);
  const above = 8 + said.length * LINE;
  return {
    items,
    columns,
    height: above + kinds.length * high + 38,
    rows: [["corruption", ...severities.map((severity) => `severity ${severity}`)], ...kinds.map((kind) => [kind, ...table[kind].slice(0, columns)])],
    option: {
      title: { text: said.join("\n"), left: 0, top: 0, textStyle: { fontSize: 12, fontWeight: 400, lineHeight: LINE, color: colour("quiet"), fontFamily: FONT } },
      grid: { ...OWN, left, top: above, width: wide, height: kinds.length * high },
      xAxis: axis("severity", { type: "category", data: severities, splitLine: { show: false }, axisLine: { show: false }, nameGap: 24 }),
      yAxis: axis("", { type: "category", data: kinds.map(spoken), inverse: true, splitLine: { show: false }, axisLine: { show: false }, axisLabel: { color: colour("quiet"), fontFamily: FONT, fontSize: 12, interval: 0, width: left - 12, overflow: "truncate" } }),
      series: [
        shapes("places", data, (api, index) => {
          const [x, y] = api.coord([api.value(0), api.value(1)]);
          const [w, h] = api.size([1, 1]);
          const rgb = viridis(top > low ? (data[index][2] - low) / (top - low) : 0.5);
          return {
            type: "group",
            children: [
              { type: "rect", shape: { x: x - w / 2 + 0.5, y: y - h / 2 + 0.5, width: w - 1, height: h - 1 }, style: { fill: `rgb(${rgb.join(",")})` } },
              { type: "text", silent: true, style: { text: inDigits(100 * data[index][2], 1), x, y, fill: readable(rgb), align: "center", verticalAlign: "middle", font: `12px ${FONT}` } },
            ],
          };
        }),
      ],
    },
  };
}

/** Certified accuracy over the radius, by the proved bound and by an assumed one, and what attacks left. */
export function certified({ lines, attacks }, width) {
  const colours = palette();
  const items = [];
  const series = [];
  const most = Math.max(...lines.flatMap(({ points }) => points.map(([radius]) => radius)), ...attacks.map(({ eps }) => eps), 0.01);
  const rows = [["line", "norm", "radius", "accuracy"]];
  lines.forEach(({ id, name, points, dense }, index) => {
    const data = points.map(([radius, share]) => [radius, 100 * share]);
    series.push({
      id,
      type: "line",
      data,
      step: dense ? "end" : false,
      showSymbol: !dense,
      symbol: "circle",
      symbolSize: 7,
      lineStyle: { color: colours[index], width: 2, type: id === "assumed" ? "dashed" : "solid" },
      itemStyle: { color: colours[index] },
      emphasis: { scale: 1.6 },
    });
    points.forEach(([radius, share], at) => {
      rows.push([name, "L2", radius, share]);
      if (!dense) items.push({ series: id, index: at, lines: [`L2 radius ${short(radius)}`, `${name} ${percent(share)}`] });
    });
    if (dense) {
      const chosen = [];
      for (let at = 0; at < 24; at += 1) chosen.push(Math.round((at / 23) * (points.length - 1)));
      series.push({ id: `${id}-points`, type: "scatter", data: chosen.map((at) => data[at]), symbolSize: 9, itemStyle: { color: "transparent" }, emphasis: { scale: 1.5, itemStyle: { color: colours[index] } } });
      chosen.forEach((at, place) => items.push({ series: `${id}-points`, index: place, lines: [`L2 radius ${short(points[at][0])}`, `${name} ${percent(points[at][1])}`] }));
    }
  });
  if (attacks.length > 0) {
    const painted = colours[3];
    series.push({
      id: "attacks",
      type: "scatter",
      z: 5,
      data: attacks.map(({ name, eps, accuracy, norm }) => ({
        value: [eps, 100 * accuracy],
        symbol: "diamond",
        symbolSize: 15,
        itemStyle: { color: norm === "L2" ? painted : colour("page"), borderColor: painted, borderWidth: 2 },
        label: { show: true, position: eps > most / 2 ? "left" : "right", distance: 8, formatter: `${name}${norm === "L2" ? "" : ` (${norm})`}`, color: colour("text"), fontFamily: FONT, fontSize: 12 },
      })),
      emphasis: { scale: 1.4 },
    });
    attacks.forEach(({ name, norm, eps, accuracy, images }, index) => {
      rows.push([name, norm, eps, accuracy]);
      items.push({ series: "attacks", index, lines: [`${name}, ${norm} radius ${short(eps)}`, `accuracy left ${percent(accuracy)}`, images ? `of ${images} images` : ""] });
    });
  }
  const keys = lines.map(({ name }, index) => ({ text: name, colour: colours[index] }));
  if (attacks.length > 0) keys.push({ text: "what an attack left", colour: colours[3], mark: true });
  const { title, high } = legend(keys, width);
  return {
    items,
    height: high + 296,
    rows,
    option: {
      title,
      grid: { ...OWN, left: 56, right: 16, top: high, bottom: 46, width: Math.min(width - 72, 720) },
      xAxis: axis("radius, in pixels of [0, 1]", { min: 0, max: Number((most * 1.05).toPrecision(3)) }),
      yAxis: axis("accuracy, %", { min: 0, max: 100, nameGap: 38 }),
      series,
    },
  };
}

/** What colours mean, above a chart, in as many lines as are needed; `high` is the room that they take. */
function legend(keys, width) {
  const rich = Object.fromEntries(keys.map((key, index) => [`k${index}`, { color: key.colour, fontWeight: 700, fontSize: 14 }]));
  const parts = keys.map((key, index) => ({
    text: `{k${index}|${key.mark ? "◆" : "━"}} ${key.text}`,
    wide: 20 + wideness(key.text),
  }));
  const lines = inLines(parts, "    ", width - 8);
  return {
    title: {
      text: lines.join("\n"),
      left: 0,
      top: 4,
      textStyle: { fontSize: 12, fontWeight: 400, lineHeight: LINE, color: colour("text"), fontFamily: FONT, rich },
    },
    high: 16 + lines.length * LINE,
  };
}

/** Images by their empirical Lipschitz constant, a chart for each space, and the certified bound. */
export function lipschitz({ searches }, width) {
  const colours = palette();
  const spaces = [...new Set(searches.map(({ space }) => space))];
  const methods = [...new Set(searches.map(({ method }) => method))];
  const items = [];
  const series = [];
  const wide = Math.min(width - 84, 720);
  const named = (space) => wrapped(`largest change of an output per unit of distance, ${space === "pixels" ? "pixels of [0, 1]" : `${space} pixels`}, logarithmic`, wide);
  const [high, below] = [190, 64 + LINE * Math.max(...spaces.map((space) => named(space).length))];
  const { title, high: above } = legend(methods.map((method, index) => ({ text: method, colour: colours[index] })), width);
  const rows = [["space", "search", "from", "to", "images", "certified bound"]];
  const grid = [];
  const [xAxis, yAxis] = [[], []];
  spaces.forEach((space, which) => {
    const mine = searches.filter((one) => one.space === space);
    const positive = mine.flatMap(({ histogram }) => histogram.edges.filter((edge) => edge > 0));
    const bounds = mine.map(({ bound }) => bound).filter((bound) => bound !== null && bound > 0);
    const least = Math.min(...positive, ...bounds) * 0.9;
    const most = Math.max(...positive, ...bounds) * 1.15;
    const tallest = Math.max(1, ...mine.flatMap(({ histogram }) => histogram.counts));
    const values = decades(least, most);
    grid.push({ ...OWN, left: 64, top: above + which * (high + below), width: wide, height: high });
    xAxis.push(
      axis(named(space).join("\n"), {
        type: "log",
        gridIndex: which,
        min: least,
        max: most,
        axisLabel: { color: colour("quiet"), fontFamily: FONT, fontSize: 12, hideOverlap: true, formatter: tick, customValues: values },
        axisTick: { show: false, customValues: values },
        nameTextStyle: { color: colour("text"), fontFamily: FONT, fontSize: 12, lineHeight: LINE },
        nameGap: 26,
      }),
    );
    yAxis.push(axis("images", { gridIndex: which, nameGap: 44, minInterval: 1 }));
    for (const { method, histogram, bound, images } of mine) {
      const id = `${space} ${method}`;
      const fill = colours[methods.indexOf(method)];
      const bars = [];
      histogram.counts.forEach((count, index) => {
        const [from, to] = [histogram.edges[index], histogram.edges[index + 1]];
        rows.push([space, method, from, to, count, bound]);
        if (count === 0 || to <= 0) return;
        items.push({ series: id, index: bars.length, lines: [`${space}, ${method}: ${short(from)} to ${short(to)}`, `${count} of ${images ?? "all"} images`, bound === null ? "" : `certified bound ${short(bound)}`] });
        bars.push([Math.max(from, least), to, count]);
      });
      series.push(
        shapes(
          id,
          bars,
          (api, index) => {
            const [from, to, count] = bars[index];
            const shape = rectangle(api.coord([from, 0]), api.coord([to, count]), 0);
            return { type: "rect", shape, style: { fill, opacity: mine.length > 1 ? 0.6 : 0.9 } };
          },
          { xAxisIndex: which, yAxisIndex: which, encode: { x: [0, 1], y: 2 } },
        ),
      );
    }
    if (bounds.length > 0) {
      series.push(level(`${space} bound`, [bounds[0], 0], [bounds[0], tallest], `certified bound ${short(bounds[0])}`, "front", [6, 4], { xAxisIndex: which, yAxisIndex: which }));
    }
  });
  return {
    items,
    height: above + spaces.length * (high + below) - 18,
    rows,
    option: { title, grid, xAxis, yAxis, series },
  };
}

/** The reliability diagram with how many images each bin has. */
export function reliability({ diagrams }, width) {
  const colours = palette();
  const items = [];
  const series = [];
  const rows = [["network", "from", "to", "images", "mean confidence", "accuracy"]];
  const wide = Math.min(width - 88, 560);
  for (const [which, { name, diagram }] of diagrams.entries()) {
    const fill = colours[which];
    const bars = [];
    const counts = [];
    diagram.count.forEach((count, index) => {
      const [from, to] = [diagram.edges[index], diagram.edges[index + 1]];
      const [confidence, accuracy] = [diagram.confidence[index], diagram.accuracy[index]];
      rows.push([name, from, to, count, confidence, accuracy]);
      if (count === 0) return;
      const gap = accuracy - confidence;
      const lines = [
        `${name}: confidence ${percent(from)} to ${percent(to)}`,
        `accuracy ${percent(accuracy)}, mean confidence ${percent(confidence)}`,
        `${inDigits(Math.abs(100 * gap), 1)} points too ${gap < 0 ? "sure" : "unsure"}; ${count} images`,
      ];
      items.push({ series: `bins${which}`, index: bars.length, lines });
      bars.push([100 * from, 100 * to, 100 * accuracy, 100 * confidence]);
      counts.push([100 * from, 100 * to, count]);
    });
    if (which === 0) {
      series.push(
        shapes("bins0", bars, (api, index) => {
          const [from, to, accuracy] = bars[index];
          return { type: "rect", shape: rectangle(api.coord([from, 0]), api.coord([to, accuracy])), style: { fill, opacity: 0.85 } };
        }, { encode: { x: [0, 1], y: 2 } }),
      );
      series.push({ id: "means", type: "line", silent: true, data: bars.map(([, , accuracy, confidence]) => [confidence, accuracy]), symbol: "circle", symbolSize: 5, lineStyle: { color: colour("text"), width: 1 }, itemStyle: { color: colour("text") }, z: 6 });
    } else {
      series.push({ id: `bins${which}`, type: "line", data: bars.map(([, , accuracy, confidence]) => [confidence, accuracy]), symbol: "diamond", symbolSize: 10, lineStyle: { color: fill, width: 2, type: "dashed" }, itemStyle: { color: fill }, z: 7, emphasis: { scale: 1.5 } });
    }
    const half = (index, [from, to]) => (diagrams.length === 1 ? [from, to] : index === 0 ? [from, (from + to) / 2] : [(from + to) / 2, to]);
    series.push(
      shapes(`counts${which}`, counts, (api, index) => {
        const [from, to] = half(which, counts[index]);
        return { type: "rect", shape: rectangle(api.coord([from, 0]), api.coord([to, counts[index][2]])), style: { fill, opacity: 0.85 } };
      }, { xAxisIndex: 1, yAxisIndex: 1, encode: { x: [0, 1], y: 2 } }),
    );
    counts.forEach((_, index) => items.push({ ...items.find((one) => one.series === `bins${which}` && one.index === index), series: `counts${which}`, index }));
  }
  series.push(level("diagonal", [0, 0], [100, 100], "", "quiet"));
  const { title, high } = legend(diagrams.map(({ name }, index) => ({ text: `the network ${name}`, colour: colours[index] })), width);
  return {
    items: [...items.filter(({ series: id }) => id.startsWith("bins")), ...items.filter(({ series: id }) => id.startsWith("counts"))],
    height: high + 466,
    rows,
    option: {
      title,
      grid: [
        { ...OWN, left: 72, top: high, width: wide, height: 270 },
        { ...OWN, left: 72, top: high + 312, width: wide, height: 100 },
      ],
      xAxis: [axis("", { min: 0, max: 100, axisLabel: { show: false } }), axis("confidence, %", { min: 0, max: 100, gridIndex: 1 })],
      yAxis: [axis("accuracy, %", { min: 0, max: 100, nameGap: 38 }), axis("images", { gridIndex: 1, nameGap: 44, minInterval: 1 })],
      series,
    },
  };
}

/** The singular values of every layer at the end: from the smallest to the largest, quantiles where they are known. */
export function ranges({ layers, delta }, width) {
  const [range, before] = palette();
  const items = [];
  const rows = [["layer", "kind", "smallest", "5 %", "25 %", "median", "75 %", "95 %", "largest", "largest before projection"]];
  const label = Math.min(170, Math.max(...layers.map(({ name }) => 7 * name.length), 40));
  const high = 22;
  const tops = layers.flatMap((one) => [one.largest, one.largest_before_projection ?? 0]);
  const most = Math.max(...tops, delta ?? 0) * 1.06;
  layers.forEach((one, index) => {
    const [, q05, q25, q50, q75, q95] = one.quantiles ?? [];
    const inner = one.quantiles ? `5 % ${short(q05)}, 25 % ${short(q25)}, median ${short(q50)}, 75 % ${short(q75)}, 95 % ${short(q95)}` : "";
    const old = one.largest_before_projection;
    rows.push([one.name, one.kind, one.smallest, q05, q25, q50, q75, q95, one.largest, old]);
    items.push({
      series: "ranges",
      index,
      lines: [
        `${one.name || "(model)"}, ${one.kind}`,
        `${one.smallest === null ? "" : `smallest ${short(one.smallest)}, `}largest ${short(one.largest)}`,
        inner,
        old === null || old === undefined ? "" : `largest before the last projection ${short(old)}`,
      ],
    });
  });
  const stroke = (api, row, from, to, half) => {
    const [x1, y] = api.coord([from, row]);
    const [x2] = api.coord([to, row]);
    return { x: x1, y: y - half, width: Math.max(2, x2 - x1), height: 2 * half };
  };
  const series = [
    shapes("ranges", layers.map((one, row) => [one.largest, row]), (api, row) => {
      const one = layers[row];
      const [low, q05, q25, q50, q75, q95, top] = one.quantiles ?? [one.smallest ?? one.largest, null, null, null, null, null, one.largest];
      const children = [{ type: "rect", shape: stroke(api, row, low, top, one.quantiles ? 2 : 5), style: { fill: range, opacity: one.quantiles ? 0.55 : 0.85 } }];
      if (one.quantiles) {
        children.push({ type: "rect", shape: stroke(api, row, q05, q95, 4.5), style: { fill: range, opacity: 0.6 } });
        children.push({ type: "rect", shape: stroke(api, row, q25, q75, 7), style: { fill: range } });
        const [x, y] = api.coord([q50, row]);
        children.push({ type: "rect", shape: { x: x - 1, y: y - 8, width: 2, height: 16 }, style: { fill: colour("text") } });
      }
      if (one.largest_before_projection !== null && one.largest_before_projection !== undefined) {
        const [x, y] = api.coord([one.largest_before_projection, row]);
        children.push({ type: "rect", shape: { x: x - 1.5, y: y - 8, width: 3, height: 16 }, style: { fill: before } });
      }
      return { type: "group", children };
    }),
  ];
  if (delta !== null) series.push(level("delta", [delta, -0.5], [delta, layers.length - 0.5], `δ = ${short(delta)}`, "text", [6, 4], { above: true }));
  const keys = [{ text: layers.some((one) => one.quantiles) ? "least to largest, 5 to 95 %, quartiles, median" : "least to largest", colour: range }];
  if (layers.some((one) => one.largest_before_projection != null)) keys.push({ text: "largest before the last projection", colour: before });
  const { title, high: room } = legend(keys, width);
  const above = room + (delta === null ? 0 : LINE); // the threshold is named above the first bar
  return {
    items,
    height: above + layers.length * high + 48,
    rows,
    option: {
      title,
      grid: { ...OWN, left: label + 14, right: 20, top: above, height: layers.length * high, width: Math.min(width - label - 34, 900) },
      xAxis: axis("singular value", { min: 0, max: Number(most.toPrecision(3)) }),
      yAxis: axis("", { type: "category", data: layers.map(({ name }) => name || "(model)"), inverse: true, splitLine: { show: false }, axisLabel: { color: colour("quiet"), fontFamily: FONT, fontSize: 12, interval: 0, width: label, overflow: "truncate" } }),
      series,
    },
  };
}
