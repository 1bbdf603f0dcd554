// The cells of a leaderboard in the plane of two metrics, and as lines over all fields in which they differ.
import { init } from "/static/lib/echarts.js";
import { grouped, inDigits, short, telling, tick } from "/static/numbers.js";
import { crossings, drawCrossings, scaleOf } from "/static/parallel.js";
import { element, isAway, patience } from "/static/request.js";
import { fileName, save } from "/static/save.js";
import { colour, isDark, onScheme, palette, sharp, viridis } from "/static/theme.js";
import { hideTip, showTip } from "/static/tip.js";

const FONT = "system-ui, sans-serif";
const SHAPES = ["circle", "rect", "triangle", "diamond", "pin", "arrow", "roundRect"];
const GLYPHS = ["●", "■", "▲", "◆", "▼", "➤", "▣"]; // the same in a line of text
const MOST_BARS = 1500;
const MOST_AXES = 10;
const KEYS = 40;

const figure = document.querySelector(".plane-figure");
const place = figure.querySelector(".canvas");
const crossed = document.querySelector(".parallel-figure");
const ranges = figure.querySelector("form.ranges");
const legend = figure.querySelector(".scale");
const readout = figure.querySelector(".readout");
const byField = figure.querySelector("select[name=by]");
const chooser = figure.querySelector("button[data-brush]");
const metrics = JSON.parse(figure.dataset.metrics);
let data = null;
let say = new Map(); // how the values of each field are said
let chart = null;
let outlined = []; // the rectangle that was drawn
let chosen = null;
let at = -1;
let shownFields = []; // the fields that are axes of their own

const shown = (axis, value, mean = value) => inDigits(value * metrics[axis].factor, metrics[axis].decimals, mean * metrics[axis].factor);
const title = (axis) => `${metrics[axis].heading}${metrics[axis].unit ? ` (${metrics[axis].unit})` : ""}`;
const scaled = (axis) => data[axis].map((value) => value * metrics[axis].factor);
const wide = (values) => values.every((value) => value > 0) && Math.max(...values) / Math.min(...values) > 30;
const differing = () => [...data.columns, ...data.decided];

function words(index) {
  const where = data.columns.map(({ field, name }) => `${name} ${say.get(field)(data.fields[field][index])}`);
  const number = (axis) => {
    const [value, error] = [data[axis][index], data[`${axis}_error`][index]];
    const spread = error === null ? "" : ` ± ${shown(axis, error, value)}`;
    return `${metrics[axis].heading} ${shown(axis, value)}${spread}${metrics[axis].unit ? ` ${metrics[axis].unit}` : ""}`;
  };
  const [seeds, trials] = [data.seeds[index], data.trials[index]];
  const count = `${seeds === trials ? seeds : `${seeds} of ${trials}`} ${trials === 1 ? "seed" : "seeds"}`;
  return [where.join(", ") || "the only configuration", number("y"), number("x"), data.front[index] ? `${count}, on the Pareto front` : count];
}

/** Of each cell its colour and mark by the chosen field, and what they mean. */
function paint() {
  const dark = isDark();
  const colours = palette();
  const field = byField.value;
  if (!field) return { of: () => ({ colour: colours[0], symbol: "circle" }), keys: [] };
  const values = data.fields[field];
  const said = say.get(field);
  const texts = [...new Set(values.map(said))];
  if (values.every((value) => value === null || typeof value === "number") && texts.length > colours.length) {
    const known = values.filter((value) => value !== null);
    const [low, top] = [Math.min(...known), Math.max(...known)];
    const scale = wide(known) ? Math.log : (value) => value;
    const share = (value) => (scale(value) - scale(low)) / (scale(top) - scale(low) || 1);
    const hue = (value) => `rgb(${viridis(dark ? 0.25 + 0.75 * share(value) : 0.9 * share(value)).join(",")})`;
    return {
      of: (index) => ({ colour: values[index] === null ? colour("quiet") : hue(values[index]), symbol: "circle" }),
      keys: [low, top].map((value) => [said(value), hue(value), "circle"]),
    };
  }
  const order = [...new Map(values.map((value) => [said(value), value])).entries()].sort(([, a], [, b]) => (a > b) - (a < b));
  const rank = new Map(order.map(([text], index) => [text, index]));
  const style = (text) => ({
    colour: colours[rank.get(text) % colours.length],
    symbol: SHAPES[Math.floor(rank.get(text) / colours.length) % SHAPES.length],
  });
  return {
    of: (index) => style(said(values[index])),
    keys: order.map(([text]) => [text, style(text).colour, style(text).symbol]),
  };
}

function options() {
  const [xs, ys] = [scaled("x"), scaled("y")];
  const painted = paint();
  const log = { x: wide(xs), y: wide(ys) };
  const front = xs.map((_, index) => index).filter((index) => data.front[index]).sort((a, b) => xs[a] - xs[b]);
  const axis = (which) => ({
    type: log[which] ? "log" : "value",
    scale: true,
    name: `${title(which)}${log[which] ? ", logarithmic" : ""}, ${metrics[which].best} is better`,
    nameLocation: "middle",
    nameGap: which === "x" ? 30 : 52,
    nameTextStyle: { color: colour("text"), fontFamily: FONT },
    axisLabel: { color: colour("quiet"), fontFamily: FONT, hideOverlap: true, formatter: tick },
    axisLine: { lineStyle: { color: colour("grid") } },
    splitLine: { lineStyle: { color: colour("grid") } },
  });
  /** The cells whose deviations are drawn: of a great many there would be nothing to see but bars. */
  const withBars = () => {
    const all = xs.map((_, index) => index);
    return all.length <= MOST_BARS ? all : all.filter((index) => data.front[index] || chosen?.has(index)).slice(0, MOST_BARS);
  };
  const dim = (index) => (chosen === null || chosen.has(index) ? 1 : 0.15);
  const series = [
    {
      id: "front",
      type: "line",
      data: front.map((index) => [xs[index], ys[index]]),
      symbol: "none",
      silent: true,
      z: 1,
      lineStyle: { color: colour("front"), width: 1.5, type: "dashed" },
    },
    {
      id: "cells",
      type: "scatter",
      z: 3,
      data: xs.map((x, index) => {
        const { colour: fill, symbol } = painted.of(index);
        return {
          value: [x, ys[index], index],
          symbol,
          symbolSize: data.front[index] ? 11 : 8,
          itemStyle: {
            color: fill,
            opacity: 0.85 * dim(index),
            borderColor: data.front[index] ? colour("text") : colour("page"),
            borderWidth: data.front[index] ? 1.5 : 0.5,
          },
        };
      }),
      emphasis: { scale: 1.4 },
    },
  ];
  const barred = withBars();
  /** From where to where a cell's deviation reaches; null: it has none, or one that no logarithmic axis has. */
  const reach = (which, index) => {
    const [at, error] = [(which === "x" ? xs : ys)[index], data[`${which}_error`][index]];
    const [from, to] = [at - error * metrics[which].factor, at + error * metrics[which].factor];
    return !error || (log[which] && from <= 0) ? null : [from, to];
  };
  if (barred.length > 0) {
    series.unshift({
      id: "errors",
      type: "custom",
      silent: true,
      clip: true,
      z: 2,
      zlevel: 0, // ECharts gives shapes of a custom series no level by itself where a brush has them drawn anew
      data: barred.map((index) => [xs[index], ys[index], index, ...(reach("x", index) ?? [xs[index], xs[index]]), ...(reach("y", index) ?? [ys[index], ys[index]])]),
      // The axes reach to their ends, but where the bars are those of the chosen, by which nothing is to move.
      ...(barred.length === xs.length && { encode: { x: [0, 3, 4], y: [1, 5, 6] } }),
      renderItem: (_, api) => {
        const index = api.value(2);
        const children = [];
        for (const which of ["x", "y"]) {
          const ends = reach(which, index);
          if (ends === null) continue;
          const [[x1, y1], [x2, y2]] = ends.map((end) => api.coord(which === "x" ? [end, ys[index]] : [xs[index], end]));
          children.push({
            type: "line",
            shape: { x1, y1, x2, y2 },
            style: { stroke: painted.of(index).colour, lineWidth: 1, opacity: 0.45 * dim(index) },
          });
        }
        return { type: "group", children };
      },
    });
  }
  return {
    painted,
    option: {
      animation: false,
      textStyle: { fontFamily: FONT },
      grid: { left: 70, right: 20, top: 12, bottom: 52 },
      xAxis: axis("x"),
      yAxis: axis("y"),
      brush: {
        xAxisIndex: 0,
        yAxisIndex: 0,
        throttleType: "debounce",
        throttleDelay: 150,
        outOfBrush: {},
        brushStyle: { color: "rgba(120,160,220,0.15)", borderColor: colour("running"), borderWidth: 1 },
        toolbox: [],
      },
      series,
    },
  };
}

/** The axes over which each cell is a line: the fields that are chosen, then both metrics. */
function axes() {
  const fields = differing().filter(({ field }) => shownFields.includes(field));
  return [
    ...fields.map(({ field, name }) => ({ name, ...scaleOf(data.fields[field], say.get(field)) })),
    ...["x", "y"].map((axis) => ({ name: title(axis), ...scaleOf(scaled(axis), short, true) })),
  ];
}

function drawOverFields() {
  const painted = paint();
  const faint = 0.4 * Math.min(1, Math.sqrt(200 / data.cell.length)); // so that where many run shows among more, too
  drawCrossings(lines, {
    axes: axes(),
    style: (index) => ({
      colour: painted.of(index).colour,
      opacity: chosen === null ? faint : chosen.has(index) ? 0.85 : 0.05,
      width: data.front[index] ? 2.5 : 1,
    }),
  });
}

const lines = crossings(crossed, {
  words: (index) => words(index),
  open: (index, aside) => open(index, aside),
  order: () => data.cell.map((_, index) => index).sort((a, b) => data.y[a] - data.y[b] || data.x[a] - data.x[b]),
});

/** What colours and marks mean, as [text, colour, glyph]. */
const keysOf = (painted) =>
  painted.keys.slice(0, KEYS).map(([text, fill, symbol]) => [text, fill, GLYPHS[SHAPES.indexOf(symbol)] ?? GLYPHS[0]]);

function draw() {
  if (data === null || data.cell.length === 0) return;
  chart = sharp(chart);
  const anew = chart === null;
  chart ??= listen(init(place, null, { renderer: "canvas", devicePixelRatio }));
  const { painted, option } = options();
  chart.setOption(option, { replaceMerge: ["series"] }); // all else stays, such as the rectangle that was drawn
  if (anew && outlined.length > 0) chart.dispatchAction({ type: "brush", areas: outlined });
  if (!crossed.hidden) drawOverFields();
  const keys = keysOf(painted).map(([text, fill, glyph]) => {
    const mark = element("span", glyph, [], { class: "glyph", "aria-hidden": "true" });
    mark.style.color = fill;
    return element("span", "", [mark, element("span", text, [], { dir: "auto" })], { class: "key" });
  });
  legend.replaceChildren(...keys);
  figure.dataset.drawn = String(data.cell.length);
  if (chooser.getAttribute("aria-pressed") === "true") brushing(true);
}

function open(index, aside) {
  if (aside) window.open(cellAddress(index), "_blank", "noopener");
  else location.assign(cellAddress(index));
}

function cellAddress(index) {
  return `/trials?${new URLSearchParams({ dataset: data.dataset, cell: data.cell[index] })}`;
}

function listen(made) {
  made.on("mousemove", ({ seriesId, data: row, event }) => {
    if (seriesId === "cells") showTip(event.event.clientX, event.event.clientY, words(row.value[2]));
  });
  made.on("mouseout", hideTip);
  made.on("globalout", hideTip);
  made.on("click", ({ seriesId, data: row, event }) => {
    if (seriesId !== "cells") return;
    open(row.value[2], event.event.ctrlKey || event.event.metaKey);
  });
  made.on("brush", ({ areas }) => {
    outlined = areas;
  });
  made.on("brushEnd", ({ areas }) => {
    fillRanges(areas[0]?.coordRange ?? null);
    choose(areas[0] ? within(areas[0].coordRange) : null);
  });
  return made;
}

function within([[left, right], [low, high]]) {
  const found = new Set();
  data.cell.forEach((_, index) => {
    const [x, y] = [data.x[index] * metrics.x.factor, data.y[index] * metrics.y.factor];
    if (x >= left && x <= right && y >= low && y <= high) found.add(index);
  });
  return found;
}

/** The numbers of a rectangle, where they can be read and changed. */
function fillRanges(rectangle) {
  ["x", "y"].forEach((axis, which) => {
    ["from", "to"].forEach((end, at) => {
      const value = rectangle?.[which][at];
      ranges.elements[`${axis}_${end}`].value = value === undefined ? "" : String(Number(value.toPrecision(6)));
    });
  });
}

/** The rectangle that numbers say, an empty one being an open end; null: there is none. */
function typedRange() {
  const value = (name, open) => (ranges.elements[name].value === "" ? open : Number(ranges.elements[name].value));
  if (Object.values(Object.fromEntries(new FormData(ranges))).every((text) => text === "")) return null;
  return ["x", "y"].map((axis) => [value(`${axis}_from`, -Infinity), value(`${axis}_to`, Infinity)]);
}

ranges.addEventListener("submit", (event) => event.preventDefault());
ranges.addEventListener("change", () => {
  chart?.dispatchAction({ type: "brush", areas: [] });
  const range = typedRange();
  choose(range === null ? null : within(range));
});
ranges.addEventListener("reset", () => {
  chart?.dispatchAction({ type: "brush", areas: [] });
  choose(null);
});

const rowsOf = (within) => [...within.querySelectorAll(`tr[data-cell][data-protocol="${data.protocol}"]`)];
/** What columns are called: the paper's values by the metric that they stand beside. */
const headings = (table) =>
  [...table.tHead.rows[0].cells].map((cell) => {
    const text = cell.textContent.trim();
    return text === "paper" ? `${cell.previousElementSibling.textContent.trim()}, ${text}` : text;
  });
const elsewhere = new Map();
let following = null; // the next page; undefined after the last

/** A row of another page with the columns of this one's table. */
function fitted(row, ours, theirs) {
  const cells = [...row.cells];
  row.replaceChildren(...ours.map((heading) => cells[theirs.indexOf(heading)] ?? element("td", "–")));
  row.dataset.elsewhere = "";
  return document.adoptNode(row);
}

/** Reads the board's pages until the rows of all these cells are known. */
async function readRows(names, table) {
  if (following === null) {
    following = new URL(location.href);
    for (const name of ["standing", "mean", "tie", "pivot"]) following.searchParams.delete(name);
    const asked = { protocol: data.protocol, limit: 200, draw: "false", columns: table.dataset.fields };
    for (const [name, value] of Object.entries(asked)) if (value !== "") following.searchParams.set(name, value);
  }
  while (following && [...names].some((name) => !elsewhere.has(name))) {
    const response = await fetch(following, { headers: { Accept: "text/html" }, credentials: "same-origin" });
    if (!response.ok) return;
    const page = new DOMParser().parseFromString(await response.text(), "text/html");
    const theirs = page.querySelector("table[data-fields]");
    for (const row of theirs ? rowsOf(theirs) : []) elsewhere.set(row.dataset.cell, fitted(row, headings(table), headings(theirs)));
    const next = page.querySelector("a[rel=next]");
    following = next ? new URL(next.getAttribute("href"), following) : undefined;
  }
}

/** Tells who counts the boxes that are checked: those of rows that are gone are no more. */
const counted = () => document.dispatchEvent(new CustomEvent("refreshed"));

/** Only these cells are bright, and in the table: those of its other pages, too. */
async function choose(indices) {
  chosen = indices;
  const names = chosen === null ? null : new Set([...chosen].map((index) => data.cell[index]));
  for (const row of rowsOf(document)) if ("elsewhere" in row.dataset) row.remove();
  const here = rowsOf(document);
  for (const row of here) row.hidden = names !== null && !names.has(row.dataset.cell);
  readout.textContent = "";
  counted();
  paintChosen();
  if (names === null) return;
  const table = here[0]?.closest("table");
  for (const row of here) names.delete(row.dataset.cell);
  if (names.size > 0 && table) await readRows(names, table).catch(() => null);
  if (chosen !== indices) return; // another rectangle was drawn meanwhile
  const more = [...elsewhere.values()].filter((row) => names.has(row.dataset.cell));
  if (table) table.tBodies[0].append(...more);
  counted();
  const left = here.filter((row) => !row.hidden).length + more.length;
  readout.textContent = `${chosen.size} of ${data.cell.length} configurations chosen; ${left} of them stand in the table below.`;
}

function paintChosen() {
  const { option } = options();
  chart.setOption({ series: option.series });
  if (!crossed.hidden) drawOverFields();
}

function brushing(on) {
  chart.dispatchAction({
    type: "takeGlobalCursor",
    key: "brush",
    brushOption: on ? { brushType: "rect", brushMode: "single" } : { brushType: false },
  });
}

chooser.addEventListener("click", () => {
  if (chart === null) return;
  const on = chooser.getAttribute("aria-pressed") !== "true";
  chooser.setAttribute("aria-pressed", String(on));
  if (!on) {
    chart.dispatchAction({ type: "brush", areas: [] });
    ranges.reset();
    choose(null);
  }
  brushing(on);
});
/** What was chosen of a page that is left is found again: a browser keeps no choice among what is offered later. */
function remember(choice) {
  history.replaceState({ ...history.state, ...choice }, "");
}

byField.addEventListener("change", () => {
  remember({ by: byField.value });
  draw();
});
figure.addEventListener("click", (event) => {
  const kind = event.target.closest("button[data-save]")?.dataset.save;
  if (!kind || chart === null) return;
  saveAs(kind, fileName("plane", data.dataset, data.x_metric, data.y_metric));
});

/** What colours and marks mean as titles of a picture, in lines that fit, and how high they are. */
function keyTitles(painted, width) {
  const rows = [[]];
  let left = 70;
  for (const [text, fill, glyph] of keysOf(painted)) {
    const wanted = 24 + 7.5 * text.length;
    if (left + wanted > width - 20 && rows.at(-1).length > 0) {
      rows.push([]);
      left = 70;
    }
    rows.at(-1).push({ text, fill, glyph, left });
    left += wanted;
  }
  const style = { fontSize: 12, fontFamily: FONT, fontWeight: "normal" };
  const titles = rows.flatMap((row, line) =>
    row.map(({ text, fill, glyph, left: at }) => ({
      text: `{mark|${glyph}} {text|${text.replace(/[{}|]/g, " ")}}`,
      left: at,
      top: 4 + 18 * line,
      padding: 0,
      textStyle: { rich: { mark: { ...style, color: fill }, text: { ...style, color: colour("text") } } },
    })),
  );
  return { titles, height: titles.length > 0 ? 18 * rows.length + 6 : 0 };
}

/** The picture as a file, with what its colours mean above it. */
function saveAs(kind, name) {
  const width = place.clientWidth;
  const { painted, option } = options();
  const { titles, height } = keyTitles(painted, width);
  const size = { width, height: place.clientHeight + height };
  const { brush: _, ...rest } = option;
  const whole = { ...rest, backgroundColor: colour("page"), title: titles, grid: { ...rest.grid, top: rest.grid.top + height } };
  if (kind === "png") {
    const aside = init(document.createElement("div"), null, { renderer: "canvas", ...size });
    aside.setOption(whole);
    save(`${name}.png`, aside.renderToCanvas({ pixelRatio: 2, backgroundColor: colour("page") })).then(() => aside.dispose());
    return;
  }
  const aside = init(null, null, { renderer: "svg", ssr: true, ...size });
  aside.setOption(whole);
  save(`${name}.svg`, aside.renderToSVGString(), "image/svg+xml");
  aside.dispose();
}

place.addEventListener("keydown", (event) => {
  if (data === null || data.cell.length === 0) return;
  const order = data.cell.map((_, index) => index).sort((a, b) => data.x[a] - data.x[b] || data.y[a] - data.y[b]);
  const step = { ArrowRight: 1, ArrowLeft: -1, Home: -order.length, End: order.length }[event.key];
  if (event.key === "Enter" && at >= 0) open(order[at]);
  if (step === undefined) return;
  event.preventDefault();
  at = Math.min(order.length - 1, Math.max(0, at + step));
  readout.textContent = words(order[at]).join("; ");
  chart.dispatchAction({ type: "downplay", seriesId: "cells" });
  chart.dispatchAction({ type: "highlight", seriesId: "cells", dataIndex: order[at] });
});

/** A box for each field that may be an axis. */
function offerAxes() {
  const box = ({ field, name }) => {
    const input = element("input", "", [], { type: "checkbox", value: field });
    input.checked = shownFields.includes(field);
    return element("label", "", [input, ` ${name}`]);
  };
  const boxes = crossed.querySelector(".checks");
  boxes.replaceChildren(...differing().map(box));
  boxes.addEventListener("change", () => {
    shownFields = [...boxes.querySelectorAll("input:checked")].map((one) => one.value);
    remember({ axes: shownFields });
    drawOverFields();
  });
}

async function load(missed = 0) {
  const response = await fetch(figure.dataset.source, { headers: { Accept: "application/json" }, credentials: "same-origin" }).catch(() => null);
  if (isAway(response)) {
    // The service is away for a moment: the plane that it drew stands meanwhile.
    setTimeout(() => load(missed + 1), patience(missed + 1));
    return;
  }
  if (!response.ok) return;
  data = await response.json();
  say = new Map(differing().map(({ field }) => [field, telling(data.fields[field])]));
  figure.hidden = data.cell.length === 0;
  if (figure.hidden) return;
  document.querySelector(".plane-fallback")?.setAttribute("hidden", "");
  for (const { field, name } of differing()) byField.append(element("option", name, [], { value: field }));
  const before = history.state ?? {};
  if (differing().some(({ field }) => field === before.by)) byField.value = before.by;
  shownFields = before.axes ?? data.columns.slice(0, MOST_AXES - 2).map(({ field }) => field);
  crossed.hidden = data.columns.length === 0;
  offerAxes();
  if (data.total > data.cell.length) {
    const best = `the best in ${metrics.x.heading}${data.front.includes(true) ? " and the front" : ""}`;
    figure.querySelector(".most").textContent = ` Of so many ${grouped(data.cell.length)} are drawn: ${best}.`;
  }
  if (data.cell.length > MOST_BARS) {
    figure.querySelector(".bars").textContent = ` Of more than ${grouped(MOST_BARS)} the deviations of the front and of the chosen are drawn alone.`;
  }
  draw();
  const kept = typedRange(); // of a page that was left a browser keeps what was written
  if (kept === null) return;
  ranges.querySelector("details").open = true;
  choose(within(kept));
}

onScheme(() => {
  chart?.resize();
  draw();
});
let width = 0;
new ResizeObserver(() => {
  if (place.clientWidth === width) return;
  width = place.clientWidth;
  chart?.resize();
  if (chart !== null && !crossed.hidden) drawOverFields();
}).observe(place);
load();
