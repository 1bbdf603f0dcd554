// Where pages have curves: with a form that says which and how, on a trial's page those of the trial.
import { CurveView, measuredOn, readCurves } from "/static/curves.js";
import { count } from "/static/numbers.js";
import { onPaper } from "/static/paper.js";
import { patience } from "/static/request.js";
import { fileName } from "/static/save.js";

const AGAIN = 5000;
const MOST = 200; // trials that the API has curves of at a time

/** The view with its form: which trials, which metrics, how they are drawn. */
function setUp(panel) {
  const form = panel.querySelector(".curves-form");
  const figure = panel.querySelector(".curves-figure");
  const problem = panel.querySelector(".curves-problem");
  const view = new CurveView(figure, { sides: form.dataset.sides ? JSON.parse(form.dataset.sides) : null });
  const { trials: named, bands, log, smoothing } = form.elements;
  const said = () => ({ bands: bands.checked, log: log.checked, smoothing: Number(smoothing.value) });
  Object.assign(view.options, said());
  const ofPage = panel.dataset.none === undefined ? named.defaultValue : ""; // none of these is there, which the page says
  let asked = null; // what is wanted now
  let drawn = null; // what the figure is of
  let curves = null; // what was answered to it
  let stale = false; // there may be more of it by now, or it had no answer
  let wanted = 0;
  let missed = 0; // answers in a row that did not come

  /** Says what is wrong with what is wanted, and whether the figure is of that. */
  function say(words, there) {
    problem.textContent = words;
    problem.hidden = words === "";
    figure.hidden = !there;
  }

  /** That there are fewer of the best than were asked for, as no more trials are drawn at a time. */
  function fewer(next) {
    const best = Number(new URLSearchParams(next).get("best"));
    const seeds = new Map();
    for (const { cell } of curves) seeds.set(cell, (seeds.get(cell) ?? 0) + 1);
    if (seeds.size >= best || curves.length + Math.max(...seeds.values()) <= MOST) return "";
    return `The best ${count(seeds.size, "configuration")}: no more than ${MOST} trials are drawn at a time.`;
  }

  function query() {
    const values = new FormData(form);
    const found = new URLSearchParams({ metrics: values.getAll("metric").join(",") || "val_accuracy" });
    const text = form.dataset.experiment === undefined ? ofPage : named.value;
    const trials = text.split(/[\s,]+/).filter(Boolean).join(",");
    if (/[^0-9,]/.test(trials)) {
      if (form.dataset.experiment === undefined) return null; // the page says so
      throw new Error("trials: write their ids with commas between, such as 7, 8");
    }
    if (trials) found.set("trials", trials);
    else if (form.dataset.experiment) {
      found.set("experiment", form.dataset.experiment);
      found.set("best", values.get("best") ?? "5");
    } else return null;
    return found;
  }

  async function load() {
    let [next, wrong] = [null, ""];
    try {
      next = query()?.toString() ?? null;
    } catch (error) {
      wrong = error.message;
    }
    if (next !== null && next === asked && !stale) return;
    if (next !== asked) curves = null;
    asked = next;
    stale = false;
    wanted += 1; // what is on its way is wanted no more
    const mine = wanted;
    if (next === null) {
      say(wrong, false);
      panel.removeAttribute("aria-busy");
      return;
    }
    panel.setAttribute("aria-busy", "true");
    try {
      const data = await readCurves(next);
      if (mine !== wanted) return;
      ({ curves } = data);
      missed = 0;
      const epochs = curves.some((curve) => curve.epoch.length > 0);
      drawn = curves.some((curve) => curve.values.some((values) => values.some((value) => value !== null))) ? next : null;
      const none = epochs ? "None of these trials has any of these metrics." : "None of these trials has done an epoch yet.";
      say(drawn === null ? none : fewer(next), drawn !== null);
      if (drawn !== null) view.show(data);
    } catch (error) {
      if (mine !== wanted) return;
      stale = true;
      say(error.message, drawn === next); // those of others are none of these
      if (!error.away) return;
      missed += 1;
      setTimeout(() => mine === wanted && here() && load(), patience(missed));
    } finally {
      if (mine === wanted) panel.removeAttribute("aria-busy");
    }
  }

  form.addEventListener("submit", (event) => {
    // A page of chosen trials lists them, too, and has them in its address: of others there is another page.
    if (form.dataset.experiment === undefined && named.value !== ofPage) return;
    event.preventDefault();
    load();
  });
  form.addEventListener("change", (event) => {
    const { name, value, checked } = event.target;
    if (name === "smoothing") view.set("smoothing", Number(value));
    else if (name === "log") view.set("log", checked);
    else if (name === "bands") view.set("bands", checked);
    else if (name !== "trials" || form.dataset.experiment !== undefined) load();
  });
  form.addEventListener("input", ({ target }) => {
    if (target.name === "smoothing") view.set("smoothing", Number(target.value));
  });
  panel.addEventListener("click", (event) => {
    const kind = event.target.closest("button[data-save]")?.dataset.save;
    if (event.target.closest("button[data-unzoom]")) view.zoomTo(null);
    if (!kind || view.data === null) return;
    const name = fileName("curves", form.dataset.experiment ? `experiment-${form.dataset.experiment}` : "trials");
    view.save(kind, name, drawn);
  });
  const here = () => !panel.classList.contains("panel") || panel.classList.contains("current");
  panel.addEventListener("shown", load);
  onPaper((on) => on && load());
  let timer = null;
  document.addEventListener("progressed", () => {
    // The best may be others by now; of trials that are named nothing comes after their ends.
    if (named.value.trim() !== "" && curves?.every(({ state }) => state !== "running" && state !== "queued")) return;
    stale = true;
    timer ??= setTimeout(() => {
      timer = null;
      if (here()) load();
    }, AGAIN);
  });
  // Of a page that was left a browser keeps what was chosen, and puts it back into the form after scripts have read it.
  addEventListener("pageshow", () => {
    const changed = Object.entries(said()).some(([option, value]) => view.options[option] !== value);
    Object.assign(view.options, said());
    if (changed) view.draw();
    if (here()) load();
  });
  if (here()) load();
}

/** The curves of one trial: what belongs together in one chart. */
function ofTrial(figure) {
  const both = { train_accuracy: "training", val_accuracy: "validation", train_loss: "training", val_loss: "validation" };
  const charts = [
    { title: "accuracy (%)", metrics: ["train_accuracy", "val_accuracy"], labels: both },
    { title: "loss (nats)", metrics: ["train_loss", "val_loss"], labels: both },
    { title: "orthogonal loss", metrics: ["ort_loss"], log: true },
    { title: "learning rate", metrics: ["lr"] },
  ];
  const view = new CurveView(figure, { charts });
  const query = new URLSearchParams({
    trials: figure.dataset.trial,
    metrics: charts.flatMap((chart) => chart.metrics).join(","),
  });
  let wanted = 0;
  let missed = 0;
  const load = async () => {
    wanted += 1;
    const mine = wanted;
    const data = await readCurves(query).catch(({ away }) => (away ? undefined : null));
    if (mine !== wanted) return; // it got on meanwhile
    missed = data === undefined ? missed + 1 : 0;
    if (data === undefined) {
      setTimeout(() => mine === wanted && load(), patience(missed)); // what was drawn stands meanwhile
      return;
    }
    const drawn = data !== null && data.curves[0].epoch.length > 0;
    figure.hidden = !drawn;
    document.getElementById("curves").hidden = drawn;
    if (!drawn) return;
    both.val_accuracy = both.val_loss = measuredOn(data.curves);
    view.show(data);
  };
  figure.addEventListener("click", (event) => {
    const kind = event.target.closest("button[data-save]")?.dataset.save;
    if (event.target.closest("button[data-unzoom]")) view.zoomTo(null);
    if (!kind || view.data === null) return;
    const name = fileName("trial", figure.dataset.trial);
    view.save(kind, name, query);
  });
  document.addEventListener("progressed", load);
  load();
}

for (const panel of document.querySelectorAll(".curves-panel")) setUp(panel);
for (const figure of document.querySelectorAll(".trial-curves")) ofTrial(figure);
