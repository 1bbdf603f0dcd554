// The singular values of the sides of a comparison laid over each other, a chart for each layer.
import { CurveView } from "/static/curves.js";
import { isAway, patience } from "/static/request.js";
import { fileName, save } from "/static/save.js";
import { colour } from "/static/theme.js";

const MOST_LAYERS = 48;

const panel = document.querySelector(".spectra-panel");
const problem = panel?.querySelector(".spectra-problem");

/** Says what is wrong; nothing where it is "". */
function say(words) {
  problem.textContent = words;
  problem.hidden = words === "";
}

/** What the service answers; throws where it refuses. Where it is away it is asked again, and that said where it lasts. */
async function read(address) {
  for (let missed = 1; ; missed += 1) {
    const response = await fetch(address, { headers: { Accept: "application/json" }, credentials: "same-origin" }).catch(() => null);
    if (response?.ok) return response.json();
    if (!isAway(response)) throw new Error(response.statusText);
    if (missed > 1) say("The service does not answer. It is asked again, and singular values are drawn once it does.");
    await new Promise((done) => setTimeout(done, patience(missed)));
  }
}

/** A trial's layers with their singular values, [{name, index, values}], and its delta; null where none were kept. */
async function spectra(trial) {
  const found = await read(`/v1/trials/${trial}?fields=config,artifacts`);
  const file = found.artifacts.find(({ kind }) => kind === "spectra");
  if (file === undefined) return null;
  const { layers } = await read(file.url);
  return { delta: found.config.constraint === "clip" ? found.config.delta : null, layers };
}

/** What `CurveView` takes: layers for metrics, indices for epochs, sides and levels for lines. */
function asCurves(sides, found) {
  const names = [...new Set(found.flatMap((one) => one?.layers.map(({ name }) => name) ?? []))].slice(0, MOST_LAYERS);
  const curves = [];
  const lines = sides.map(({ name }, index) => ({ name, trials: [`side ${index}`] }));
  const add = (trial, layers) => {
    const epoch = [...new Set(layers.flatMap(({ index }) => index))].sort((a, b) => a - b);
    const at = new Map(epoch.map((index, place) => [index, place]));
    const values = names.map((name) => {
      const column = new Array(epoch.length).fill(null);
      const layer = layers.find((one) => one.name === name);
      layer?.index.forEach((index, place) => {
        column[at.get(index)] = layer.values[place];
      });
      return column;
    });
    curves.push({ trial, experiment_id: "", number: 0, cell: trial, seed: "", state: "", fields: {}, epoch, values });
  };
  found.forEach((one, index) => one !== null && add(`side ${index}`, one.layers));
  for (const delta of new Set(found.map((one) => one?.delta ?? null).filter((delta) => delta !== null))) {
    const trial = `delta ${delta}`;
    lines.push({ name: `δ = ${delta}`, trials: [trial], style: () => ({ stroke: colour("text"), dash: [6, 5] }) });
    const last = (name) => Math.max(1, ...found.map((one) => one?.layers.find((layer) => layer.name === name)?.index.at(-1) ?? 0));
    add(trial, names.map((name) => ({ name, index: [0, last(name)], values: [delta, delta] })));
  }
  return { lines, data: { metrics: names, columns: [], decided: [], curves } };
}

async function setUp() {
  const figure = panel.querySelector(".curves-figure");
  const sides = JSON.parse(panel.dataset.sides);
  const found = await Promise.all(
    sides.map(({ layers_of: trial }) => (trial === null ? null : spectra(trial).catch(() => null))),
  );
  const names = (which) => sides.filter((side, index) => found[index] === null && which(side)).map(({ name }) => name).join("; ");
  const [kept, done] = [names(({ layers_of: trial }) => trial !== null), names(({ layers_of: trial }) => trial === null)];
  const said = [done && `Without a result yet: ${done}.`, kept && `Without a file of all singular values: ${kept}.`];
  say(said.filter(Boolean).join(" "));
  figure.hidden = found.every((one) => one === null);
  if (figure.hidden) return;
  const { lines, data } = asCurves(sides, found);
  const view = new CurveView(figure, { sides: lines, along: "index" });
  view.options.log = figure.querySelector("[name=log]").checked; // a browser may have kept it
  view.show(data);
  figure.addEventListener("change", ({ target }) => target.name === "log" && view.set("log", target.checked));
  figure.addEventListener("click", (event) => {
    const kind = event.target.closest("button[data-save]")?.dataset.save;
    if (event.target.closest("button[data-unzoom]")) view.zoomTo(null);
    if (kind === "csv") save(`${fileName("spectra")}.csv`, view.csv(), "text/csv");
    else if (kind === "svg") save(`${fileName("spectra")}.svg`, view.svg(), "image/svg+xml");
    else if (kind === "png") save(`${fileName("spectra")}.png`, view.png());
  });
}

if (panel !== null) setUp();
