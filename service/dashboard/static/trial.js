// The tabs of a trial: each reads its numbers when it is first seen, and again when the trial got on.
import { clear } from "/static/charts.js";
import { LineCharts } from "/static/lines.js";
import { onPaper, printing, read as ask } from "/static/paper.js";
import { Picture, certified, corruptions, lipschitz, load, ranges, reliability } from "/static/pictures.js";
import { element, isAway, patience } from "/static/request.js";
import { csv, fileName, save } from "/static/save.js";
import { colour as paint, onScheme, palette } from "/static/theme.js";

const { trialId, delta: threshold } = document.getElementById("tabs").dataset;
const delta = threshold ? Number(threshold) : null;
const MOST_LINES = 5000;
const KINDS = { corruptions, certified, lipschitz, reliability, ranges };

/** The service is away for a moment, which says nothing of what was measured. */
class Away extends Error {}

async function read(path) {
  const found = await ask(`/v1/trials/${trialId}/${path}`);
  if (isAway(found)) throw new Away();
  return found.status === 200 ? found.answer : null;
}

/** Whether there is a result: of a trial without one nothing is asked for. */
const measured = () => document.querySelector("#result table") !== null;
let result = null;
const readResult = async () => (measured() ? (result ??= await read("result")) : null);

const pictures = new Map(
  [...document.querySelectorAll(".picture")].map((figure) => {
    const { picture } = figure.dataset;
    return [picture, new Picture(figure, KINDS[picture], fileName("trial", trialId, picture))];
  }),
);

/** Certified radii of all images, of the file that holds them: more of the curve than the radii asked for. */
async function everyRadius() {
  const link = document.querySelector("#files a[data-kind=predictions]");
  if (link === null || printing()) return null;
  const part = async (from, to) => {
    const response = await fetch(link.href, { headers: { Range: `bytes=${from}-${to - 1}` }, credentials: "same-origin" }).catch(() => null);
    return response !== null && response.status === 206 ? response.arrayBuffer() : null;
  };
  const size = await part(0, 8);
  if (size === null) return null;
  const begin = 8 + Number(new DataView(size).getBigUint64(0, true));
  const header = await part(8, begin);
  if (header === null) return null;
  const entry = JSON.parse(new TextDecoder().decode(header)).certified_radii;
  if (entry?.dtype !== "F64" || entry.shape[0] === 0) return null;
  const values = await part(begin + entry.data_offsets[0], begin + entry.data_offsets[1]);
  return values === null ? null : new Float64Array(values).sort();
}

const POINTS = 200;

/** Share of images whose radius is larger, over radii from 0 on. */
function survival(radii, most) {
  const points = [];
  let below = 0;
  for (let at = 0; at <= POINTS; at += 1) {
    const radius = (most * at) / POINTS;
    while (below < radii.length && !(radii[below] > radius)) below += 1;
    points.push([radius, 1 - below / radii.length]);
  }
  return points;
}

async function certifiedData(evaluation) {
  const { accuracy: shares, assumed_1_lipschitz: assumed } = evaluation.certified ?? {};
  const attacks = Object.entries(evaluation.attacks ?? {}).map(([name, one]) => ({
    name,
    norm: one.norm,
    eps: one.eps,
    accuracy: one.robust_accuracy,
    images: one.images,
  }));
  if (!shares && !assumed && attacks.length === 0) return null;
  const points = (values) => [[0, evaluation.accuracy], ...Object.entries(values).map(([radius, share]) => [Number(radius), share])].sort((a, b) => a[0] - b[0]);
  const lines = [];
  if (shares) {
    const radii = await everyRadius();
    const most = Math.max(...Object.keys(shares).map(Number), ...attacks.map(({ eps }) => eps), 0.1);
    lines.push({ id: "certified", name: "certified", points: radii === null ? points(shares) : survival(radii, most), dense: radii !== null });
  }
  if (assumed) lines.push({ id: "assumed", name: "if the constant were 1", points: points(assumed), dense: false });
  return { lines, attacks };
}

async function robustness() {
  const evaluation = (await readResult())?.evaluation ?? {};
  const table = evaluation.corruptions?.table;
  await pictures.get("corruptions").show(table && Object.keys(table).length > 0 ? { table, mean: evaluation.corruptions.mean } : null);
  await pictures.get("certified").show(await certifiedData(evaluation));
  const searches = (evaluation.lipschitz ?? []).filter(({ histogram }) => histogram.edges.some((edge) => edge > 0));
  await pictures.get("lipschitz").show(searches.length > 0 ? { searches } : null);
}

async function calibration() {
  const found = (await readResult())?.evaluation?.calibration;
  const diagrams = [];
  if (found?.raw) diagrams.push({ name: "as it is", diagram: found.raw.reliability });
  if (found?.scaled) diagrams.push({ name: `at temperature ${found.temperature.toFixed(3)}`, diagram: found.scaled.reliability });
  await pictures.get("reliability").show(diagrams.length > 0 ? { diagrams } : null);
}

async function spectra() {
  await overTraining();
  const found = measured() ? await read("spectra") : null;
  const layers = (found?.layers ?? []).filter(({ largest }) => Number.isFinite(largest));
  await pictures.get("ranges").show(layers.length > 0 ? { layers, delta } : null);
  await atTheEnd(); // last, as where files are kept may be away alone
}

const MOST_FANS = 12;
const fans = document.querySelector(".fans-figure");
const fan = new LineCharts(fans, { key: "fans", along: "epoch", say: (epoch) => `epoch ${epoch}` });
const every = fans.querySelector("button[data-every]");
const NAMES = ["least", "5 %", "25 %", "median", "75 %", "95 %", "largest"];
const BANDS = [[6, 0, 0.14], [5, 1, 0.2], [4, 2, 0.3]];
let history = null;
let all = false;

/** A chart for each layer: its quantiles as a fan, those before the projection as lines, and the threshold. */
function fanCharts() {
  const [after, before] = palette();
  const log = fans.querySelector("[name=log]").checked;
  const old = fans.querySelector("[name=before]").checked;
  return history.layers.slice(0, all ? undefined : MOST_FANS).map(({ name, values, before: found }) => {
    const column = (rows, index) => rows.map((row) => (row === null ? null : row[index]));
    const series = NAMES.map((label, index) => ({
      label,
      values: column(values, index),
      stroke: index === 3 ? after : clear(after, 0.55),
      width: index === 3 ? 2 : 1,
    }));
    if (old && found.some((row) => row !== null)) {
      series.push({ label: "largest before", values: column(found, 6), stroke: before, width: 1.5, dash: [5, 3] });
      series.push({ label: "median before", values: column(found, 3), stroke: before, width: 1, dash: [2, 3] });
    }
    if (delta !== null) series.push({ label: "δ", values: history.epochs.map(() => delta), stroke: paint("text"), width: 1.5, dash: [8, 4] });
    const bands = BANDS.map(([high, low, share]) => ({ between: [high, low], fill: clear(after, share) }));
    return { title: name || "(model)", xs: history.epochs, series, bands, log, whole: true, points: false, ...(log ? {} : { from: 0 }) };
  });
}

/** What lines mean, as [text, {stroke, dash}]. */
function fanKey() {
  const [after, before] = palette();
  const key = [["least to largest, 5 to 95 %, quartiles, median", { stroke: after, dash: [] }]];
  if (history.layers.some((layer) => layer.before.some((row) => row !== null))) key.push(["largest and median before the projection", { stroke: before, dash: [5, 3] }]);
  return [...key, ...deltaKey()];
}

const deltaKey = () => (delta === null ? [] : [[`δ = ${delta}`, { stroke: paint("text"), dash: [8, 4] }]]);

function drawFanKeys() {
  every.hidden = all || history.layers.length <= MOST_FANS;
  every.textContent = `All ${history.layers.length} layers`;
  const keys = fanKey().map(([text, { stroke, dash }]) => element("span", "", [fan.stroke(stroke, dash), text], { class: "key" }));
  fans.querySelector(".keys").replaceChildren(...keys);
}

function drawFans() {
  drawFanKeys();
  fan.show(fanCharts);
}

async function overTraining() {
  const found = await read("spectra/epochs");
  fans.hidden = found === null || found.layers.length === 0;
  if (fans.hidden) return;
  history = found;
  drawFans();
}

const ends = document.querySelector(".values-figure");
const end = new LineCharts(ends, { key: "values", along: "index", say: (index) => `index ${index}` });
const everyEnd = ends.querySelector("button[data-every]");
let final = [];
let allEnds = false;

/** A chart for each layer: its singular values by their index, and the threshold. */
function endCharts() {
  const log = ends.querySelector("[name=log]").checked;
  return final.slice(0, allEnds ? undefined : MOST_FANS).map(({ name, index, values }) => {
    const series = [{ label: "singular value", values, stroke: palette()[0] }];
    if (delta !== null) series.push({ label: "δ", values: index.map(() => delta), stroke: paint("text"), width: 1.5, dash: [8, 4] });
    return { title: name || "(model)", xs: index, series, log, whole: true, points: false, ...(log ? {} : { from: 0 }) };
  });
}

function drawEnds() {
  everyEnd.hidden = allEnds || final.length <= MOST_FANS;
  everyEnd.textContent = `All ${final.length} layers`;
  end.show(endCharts);
}

/** Of the file that trials leave: older ones have none, and their least and largest values are below. */
async function atTheEnd() {
  const link = document.querySelector("#files a[data-kind=spectra]");
  const found = link === null ? null : await ask(link.getAttribute("href"));
  if (found !== null && isAway(found)) throw new Away();
  final = found?.answer?.layers ?? [];
  ends.hidden = final.length === 0;
  if (!ends.hidden) drawEnds();
}

ends.addEventListener("change", drawEnds);
ends.addEventListener("click", (event) => {
  if (event.target === everyEnd) {
    allEnds = true;
    drawEnds();
  }
  const kind = event.target.closest("button[data-save]")?.dataset.save;
  const name = fileName("trial", trialId, "singular-values");
  if (kind === "png") save(`${name}.png`, end.png(deltaKey()));
  if (kind !== "csv") return;
  const rows = final.flatMap(({ name: layer, index, values }) => index.map((place, at) => [layer, place, values[at]]));
  save(`${name}.csv`, csv([["layer", "index", "singular value"], ...rows]), "text/csv");
});

fans.addEventListener("change", drawFans);
fans.addEventListener("click", (event) => {
  if (event.target === every) {
    all = true;
    drawFans();
  }
  const kind = event.target.closest("button[data-save]")?.dataset.save;
  const name = fileName("trial", trialId, "spectra");
  if (kind === "png") save(`${name}.png`, fan.png(fanKey()));
  if (kind !== "csv") return;
  const rows = history.layers.flatMap((layer) =>
    history.epochs.flatMap((epoch, index) =>
      [["after", layer.values[index]], ["before", layer.before[index]]].filter(([, row]) => row !== null).map(([when, row]) => [layer.name, epoch, when, ...row]),
    ),
  );
  save(`${name}.csv`, csv([["layer", "epoch", "projection", ...NAMES], ...rows]), "text/csv");
});
onScheme(() => history !== null && drawFanKeys());

const used = document.querySelector(".resources-figure");
const chooser = used.querySelector("select");
const usage = new LineCharts(used, { key: "resources", along: "s", say: (seconds) => `${seconds.toFixed(0)} s after the attempt began` });
const QUANTITIES = [
  ["cpu", "CPU (% of one core)"],
  ["memory", "memory (MiB)"],
  ["gpu", "GPU (% of the time busy)"],
  ["gpu_memory", "memory on the GPU (MiB)"],
];
let attempts = [];

function drawUsage() {
  const { points } = attempts.find(({ number }) => String(number) === chooser.value);
  const xs = points.map(({ seconds }) => seconds);
  const charts = () =>
    QUANTITIES.map(([name, title], index) => ({ name, title, index, values: points.map((point) => point[name]) }))
      .filter(({ values }) => values.some((value) => value !== null))
      .map(({ title, index, values }) => ({ title, xs, from: 0, series: [{ label: title, values, stroke: palette()[index] }] }));
  usage.show(charts);
}

async function resources() {
  const found = await read("resources");
  attempts = (found?.items ?? []).filter(({ points }) => points.length > 0);
  used.hidden = attempts.length === 0;
  if (used.hidden) return;
  const newest = chooser.value === "" || chooser.value === chooser.options[chooser.options.length - 1]?.value;
  const before = chooser.value;
  chooser.replaceChildren(...attempts.map(({ number, place }) => element("option", `${number}, ${place}`, [], { value: number })));
  chooser.value = newest ? String(attempts.at(-1).number) : before;
  drawUsage();
}

chooser.addEventListener("change", () => {
  usage.zoom = null; // each attempt has its own time
  drawUsage();
});
used.addEventListener("click", (event) => {
  const kind = event.target.closest("button[data-save]")?.dataset.save;
  if (kind === "png") save(`${fileName("trial", trialId, "resources")}.png`, usage.png());
  if (kind !== "csv") return;
  const names = ["seconds", ...QUANTITIES.map(([name]) => name)];
  const rows = attempts.flatMap(({ number, place, points }) => points.map((point) => [number, place, ...names.map((name) => point[name])]));
  save(`${fileName("trial", trialId, "resources")}.csv`, csv([["attempt", "place", ...names], ...rows]), "text/csv");
});

const live = document.getElementById("log-live");
let following = null;
let silent = 0; // times in a row that there was no log to be had

/** Reads the log as it is written, while its tab is to be seen. */
async function follow() {
  if (following !== null || document.hidden) return;
  following = new AbortController();
  const { signal } = following;
  let refused = false;
  try {
    const response = await fetch(`/v1/trials/${trialId}/logs?follow=true&tail=1000`, { signal, credentials: "same-origin" });
    refused = !response.ok && !isAway(response);
    if (!response.ok) throw new Error(response.statusText);
    silent = 0;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let first = true;
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      if (value === "") continue;
      const end = live.scrollHeight - live.scrollTop - live.clientHeight < 8;
      const text = first ? value : live.textContent + value;
      const lines = text.split("\n");
      live.textContent = lines.length > MOST_LINES ? lines.slice(-MOST_LINES).join("\n") : text;
      live.hidden = false;
      document.getElementById("log").hidden = true;
      if (first || end) live.scrollTop = live.scrollHeight;
      first = false;
    }
    live.dataset.ended = "";
  } catch {
    if (following?.signal !== signal) return; // left
    following = null; // it is read anew when the tab is seen again, or soon where the service is away for a moment
    if (!refused) setTimeout(look, patience((silent += 1)));
  }
}

function leave() {
  if (following === null || live.dataset.ended !== undefined) return;
  following.abort();
  following = null;
}

const TABS = { "singular-values": spectra, robustness, calibration, resources };
const panels = Object.keys(TABS).map((id) => document.getElementById(id));
const seen = (panel) => panel.classList.contains("current");
const drawn = new Set();
const later = new Map(); // by panel: when it is asked for again
const missed = new Map(); // by panel: answers in a row that did not come
const draw = async (panel) => {
  clearTimeout(later.get(panel));
  try {
    await TABS[panel.id]();
    drawn.add(panel);
    missed.delete(panel);
  } catch (error) {
    if (!(error instanceof Away)) throw error;
    drawn.delete(panel);
    missed.set(panel, (missed.get(panel) ?? 0) + 1);
    later.set(panel, setTimeout(() => seen(panel) && draw(panel), patience(missed.get(panel)))); // what was drawn stands meanwhile
  }
};

for (const panel of panels) {
  panel.addEventListener("shown", () => draw(panel));
  if (seen(panel)) draw(panel);
}
const log = document.getElementById("followed");
const look = () => {
  if (live.dataset.open === undefined) return;
  if (seen(log) && !document.hidden) follow();
  else leave();
};
document.addEventListener("visibilitychange", look);
for (const link of document.querySelectorAll("#tabs a")) {
  document.getElementById(link.hash.slice(1)).addEventListener("shown", look);
}
look();
document.addEventListener("progressed", () => {
  const none = document.querySelector("#log [data-none]") !== null; // it was over before it wrote one
  if (!none && (live.dataset.ended !== undefined || live.dataset.open === undefined)) {
    // It may be tried again, whose log goes on.
    live.dataset.open = "";
    delete live.dataset.ended;
    following = null;
    look();
  }
  result = null;
  drawn.clear();
  for (const panel of panels) if (seen(panel)) draw(panel);
});
document.addEventListener("answered", () => {
  look();
  for (const panel of missed.keys()) if (seen(panel)) draw(panel);
});
// On paper every part of a page is to be seen: those that were not yet are drawn for it.
onPaper((on) => on && panels.filter((panel) => !drawn.has(panel)).forEach(draw));
if (measured()) (window.requestIdleCallback ?? setTimeout)(() => load());
