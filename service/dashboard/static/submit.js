// The form that takes a spec: looks at it first (dry run), then posts it.
import { count, element, send, showProblem } from "/static/request.js";

const MOST = 100; // trials that are listed
const text = document.getElementById("spec");
const problem = document.getElementById("problem");
const stored = document.getElementById("stored");
const preview = document.getElementById("preview");
const submit = document.getElementById("submit");
let key = newKey();
let busy = false;

// One key for one text: a double click, or a second try after a lost answer, stores one experiment. (Not
// crypto.randomUUID, which plain http from another machine does not have.)
function newKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function type() {
  return text.value.trimStart().startsWith("{") ? "application/json" : "application/yaml";
}

function number(value, digits = 0) {
  return value === null || value === undefined ? "–" : Number(value).toLocaleString("en", { maximumFractionDigits: digits });
}

function time(seconds) {
  if (seconds === null || seconds === undefined) return "not known yet";
  if (seconds < 90) return `${number(seconds, 1)} s`;
  if (seconds < 5400) return `${number(seconds / 60, 1)} min`;
  return `${number(seconds / 3600, 1)} h`;
}

function flatten(config, path = "") {
  const found = {};
  for (const [name, value] of Object.entries(config)) {
    if (value !== null && typeof value === "object" && !Array.isArray(value)) {
      Object.assign(found, flatten(value, `${path}${name}.`));
    } else {
      found[path + name] = value;
    }
  }
  return found;
}

/** What the service says of fields without effect: nothing, or one element. */
function warned(sentences) {
  if (!sentences || sentences.length === 0) return [];
  const title = sentences.length === 1 ? "A field has no effect:" : "Some fields have no effect:";
  const items = sentences.map((sentence) => element("li", sentence));
  const parts = [element("p", "", [element("strong", title)]), element("ul", "", items)];
  return [element("div", "", parts, { class: "warning", role: "note" })];
}

function show(answer) {
  const trials = answer.trials.slice(0, MOST);
  const flat = trials.map((trial) => flatten(trial.config));
  const names = [...new Set(flat.flatMap(Object.keys))];
  const varied = names.filter((name) => new Set(flat.map((one) => JSON.stringify(one[name]))).size > 1);
  const isNumeric = (name) => flat.every((one) => (one[name] ?? null) === null || typeof one[name] === "number");
  const numeric = new Set(varied.filter(isNumeric));
  const aligned = (right) => (right ? { class: "number" } : {});
  const headings = [
    ["#", true],
    ...varied.map((name) => [name, numeric.has(name)]),
    ...["parameters", "compression", "steps", "training"].map((name) => [name, true]),
  ];
  const head = element("tr", "", headings.map(([name, right]) => element("th", name, [], { scope: "col", ...aligned(right) })));
  const rows = trials.map((trial, index) => {
    const values = varied.map((name) => {
      const value = flat[index][name];
      return value === null || value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value);
    });
    const costs = [number(trial.parameters), number(trial.compression, 1), number(trial.steps), time(trial.seconds)];
    const cells = [
      element("th", String(trial.number), [], { class: "number", scope: "row" }),
      ...values.map((value, column) => element("td", value, [], aligned(numeric.has(varied[column])))),
      ...costs.map((value) => element("td", value, [], { class: "number" })),
    ];
    return element("tr", "", cells);
  });
  const total = `${count(answer.trial_count, "trial")} (${count(answer.grid_points, "point")}, equal ones once)`;
  const cost = `${number(answer.totals.steps)} steps; training, one trial after another: ${time(answer.totals.seconds)}`;
  const parts = [element("h2", "What would be run"), ...warned(answer.warnings), element("p", `${total}; ${cost}.`)];
  const reasons = [...new Set(trials.flatMap((trial) => trial.reasons))];
  if (reasons.length > 0) parts.push(element("p", `Not known: ${reasons.join("; ")}.`, [], { class: "quiet" }));
  const table = element("table", "", [element("thead", "", [head]), element("tbody", "", rows)]);
  parts.push(element("div", "", [table], { class: "wide", tabindex: "0", role: "region", "aria-label": "Trials" }));
  const left = answer.trial_count - trials.length;
  if (left > 0) parts.push(element("p", `and ${number(left)} more`, [], { class: "quiet" }));
  preview.replaceChildren(...parts);
  preview.hidden = false;
}

function hide(...parts) {
  for (const part of parts) part.hidden = true;
}

function refuse(result) {
  showProblem(problem, result);
  problem.focus();
}

async function look() {
  hide(problem, stored);
  const result = await send("POST", "/v1/experiments?dry_run=true", { body: text.value, type: type() });
  if (result.ok) {
    show(result.answer);
  } else {
    hide(preview);
    refuse(result);
  }
}

async function post() {
  const headers = { "Idempotency-Key": key };
  const result = await send("POST", "/v1/experiments", { body: text.value, type: type(), headers });
  if (!result.ok) {
    refuse(result);
    return;
  }
  const address = `/experiments/${Number(result.answer.id)}`;
  const warnings = warned(result.answer.warnings);
  if (warnings.length === 0) {
    location.assign(address);
    return;
  }
  const where = element("a", `experiment ${Number(result.answer.id)}`, [], { href: address });
  hide(problem, preview);
  stored.replaceChildren(element("h2", "Stored"), element("p", "As ", [where, "."]), ...warnings);
  stored.hidden = false;
  where.focus();
}

async function alone(work) {
  if (busy) return;
  busy = true;
  document.body.setAttribute("aria-busy", "true");
  await work();
  document.body.removeAttribute("aria-busy");
  busy = false;
}

document.getElementById("look").addEventListener("click", () => alone(look));
text.addEventListener("input", () => {
  key = newKey();
  hide(preview, problem, stored);
});
if (submit) {
  submit.addEventListener("click", () => alone(post));
  alone(look);
}
