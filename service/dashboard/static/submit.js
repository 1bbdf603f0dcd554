// The page that makes a spec: its text, the form in step with it, the dry run, and the post of what was looked at.
//
// There is one text. A change anywhere makes what was looked at void at once; only the answer of a dry run to the very
// text that stands there now is shown, and only that text can be posted, byte for byte.
import { count, grouped } from "/static/numbers.js";
import { element, isAway, newKey, patience, send, showProblem } from "/static/request.js";
import { SpecForm } from "/static/spec_form.js";

const MOST = 100; // trials that are listed
const PAUSE = 300; // milliseconds without a change after which is looked
const text = document.getElementById("spec");
const said = document.getElementById("said");
const problem = document.getElementById("problem");
const stored = document.getElementById("stored");
const preview = document.getElementById("preview");
const list = document.getElementById("list");
const trials = document.getElementById("trials");
const submit = document.getElementById("submit");
const odd = document.getElementById("odd");
const fields = document.getElementById("fields");

// One key for one text: a double click, or a second try after a lost answer, stores one experiment, whatever was looked
// at in between.
let looked = null; // the text of the last dry run that was answered well, and the key under which it is posted
let looking = null; // what ends the requests about a text that changed since
let pushing = false; // the form's changes are on their way into the text
let posted = history.state?.posted ?? null; // the text that was posted last, its key, and as which experiment once that is known
let posting = false;
let timer = 0;
let missed = 0; // times in a row that nothing was said of the text
let waiting = null; // what is done again once the service may be there

function typeOf(spec) {
  return spec.trimStart().startsWith("{") ? "application/json" : "application/yaml";
}

function number(value, digits = 0) {
  return value === null || value === undefined ? "–" : grouped(value, digits);
}

function time(seconds) {
  if (seconds === null || seconds === undefined) return "not known yet";
  if (seconds < 90) return `${number(seconds, 1)} s`;
  if (seconds < 5400) return `${number(seconds / 60, 1)} min`;
  return `${number(seconds / 3600, 1)} h`;
}

function span(range, said) {
  if (!range) return "–";
  return range.least === range.largest ? said(range.least) : `${said(range.least)} to ${said(range.largest)}`;
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

/** What the service warns of, such as fields without effect: nothing, or one element. */
function warned(sentences) {
  if (!sentences || sentences.length === 0) return [];
  const title = sentences.length === 1 ? "A warning:" : "Warnings:";
  const items = sentences.map((sentence) => element("li", sentence));
  const parts = [element("p", "", [element("strong", title)]), element("ul", "", items)];
  return [element("div", "", parts, { class: "warning", role: "note" })];
}

function show(answer) {
  const of = element("span", ` of ${count(answer.grid_points, "point")}, equal ones once`, [], { class: "quiet" });
  const searched = answer.trial_count === 0 ? `up to ${count(answer.grid_points, "trial")}` : count(answer.trial_count, "trial");
  const head = element("p", "", [element("strong", searched), answer.trial_count === 0 ? "" : of], { class: "count" });
  const facts = [
    ["parameters", span(answer.ranges.parameters, (value) => number(value))],
    ["compression", span(answer.ranges.compression, (value) => number(value, 1))],
    ["steps of all trials", number(answer.totals.steps)],
    ["training of one trial", answer.ranges.seconds && span(answer.ranges.seconds, time)],
    ["training, one trial after another", time(answer.totals.seconds)],
    ["GPU memory of the largest trial", answer.memory && `${number(answer.memory.gib, 2)} GiB`],
  ]
    .filter(([, value]) => value)
    .map(([name, value]) => element("div", "", [element("dt", name), element("dd", value)]));
  const parts = [head, element("dl", "", facts, { class: "record" }), ...warned(answer.warnings)];
  if (answer.memory) parts.push(element("p", `GPU memory: ${answer.memory.basis}.`, [], { class: "quiet" }));
  parts.push(...answer.notes.map((note) => element("p", `${note}.`, [], { class: "quiet" })));
  if (answer.reasons.length > 0) {
    parts.push(element("p", `Not known: ${answer.reasons.join("; ")}.`, [], { class: "quiet" }));
  }
  preview.replaceChildren(...parts);
  trials.replaceChildren(...(list.open ? table(answer) : []));
  const cost = answer.totals.seconds === null ? "" : `, ${time(answer.totals.seconds)} of training`;
  tell(`${searched}, compression ${span(answer.ranges.compression, (value) => number(value, 1))}${cost}`, true);
}

/** The first trials, in the fields in which all differ. */
function table(answer) {
  const listed = answer.trials.slice(0, MOST);
  const flat = listed.map((trial) => flatten(trial.config));
  const varied = [...answer.columns, ...answer.decided].map(({ field }) => field); // of all trials, not of these alone
  const isNumeric = (name) => flat.every((one) => (one[name] ?? null) === null || typeof one[name] === "number");
  const numeric = new Set(varied.filter(isNumeric));
  const aligned = (right) => (right ? { class: "number" } : {});
  const headings = [
    ["#", true],
    ...varied.map((name) => [name, numeric.has(name)]),
    ...["parameters", "compression", "steps", "training"].map((name) => [name, true]),
  ];
  const head = element("tr", "", headings.map(([name, right]) => element("th", name, [], { scope: "col", ...aligned(right) })));
  const rows = listed.map((trial, index) => {
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
  const whole = element("table", "", [element("thead", "", [head]), element("tbody", "", rows)]);
  const parts = [element("div", "", [whole], { class: "wide", tabindex: "0", role: "region", "aria-label": "Trials" })];
  const left = answer.trial_count - listed.length;
  if (left > 0) parts.push(element("p", `and ${number(left)} more`, [], { class: "quiet" }));
  return parts;
}

/** Says in a line how it stands; `shown`: all of it stands below as well. */
function tell(words, shown = false) {
  if (said.textContent !== words) said.textContent = words;
  said.classList.toggle("shown", shown);
}

/** Whether the form says what the text does not say yet. */
function ahead() {
  return pushing || form.dirty;
}

/** What was looked at is not what stands here any more. */
function changed() {
  looked = null;
  looking?.abort();
  looking = new AbortController();
  clearTimeout(timer);
  waiting = null;
  stored.hidden = true;
  preview.classList.add("stale");
  settle();
  tell("Checking …");
}

function settle() {
  if (submit) submit.disabled = posting || looked === null || looked.text !== text.value || ahead();
}

/** Asks about a text; that it is wrong is an answer, which is told from others by `ok` as elsewhere. */
async function ask(path, said, signal = undefined) {
  const result = await send("POST", path, { body: JSON.stringify(said), signal });
  return result.ok && result.answer.refused ? { ok: false, status: 422, answer: result.answer.refused } : result;
}

/** Whether nothing was said of the text: the service is away, or asks who sends it. */
function away(result) {
  return !result.ok && (isAway(result) || result.status === 401 || result.status === 500);
}

/** Has the API look at the text, and shows its answer if the text is still the same. */
async function look() {
  if (ahead()) return;
  keep();
  const asked = text.value;
  const { signal } = looking;
  const result = await ask("/submit/look", { text: asked, listed: list.open }, signal);
  if (signal.aborted || asked !== text.value || ahead()) return;
  const errors = result.ok ? [] : (result.answer?.errors ?? []);
  const known = form.blame(errors);
  if (!away(result)) missed = 0;
  if (result.ok) {
    text.removeAttribute("aria-invalid");
    text.setAttribute("aria-describedby", "about-spec");
    problem.hidden = true;
    const before = posted?.text === asked ? posted : null;
    looked = before !== null && before.experiment === undefined ? before : { text: asked, key: newKey() };
    tellPosted(before?.experiment);
    preview.classList.remove("stale");
    list.hidden = result.answer.trial_count === 0;
    show(result.answer);
  } else {
    text.setAttribute("aria-invalid", "true");
    text.setAttribute("aria-describedby", "problem about-spec");
    preview.replaceChildren();
    list.hidden = true;
    refuse(result, errors, known);
    const many = errors.length === 1 ? "One field is wrong" : `${errors.length} fields are wrong`;
    tell(errors.length > 0 ? `${many}: ${errors.map((one) => one.field).slice(0, 5).join(", ")}` : "Not looked at.");
    if (away(result)) again(pull, look);
  }
  settle();
}

/** Says what is wrong; a field that the form has can be gone to. */
function refuse(result, errors = [], known = []) {
  showProblem(problem, result);
  if (errors.length === 0 || result.status !== 422) return;
  const items = errors.map(({ field, message }, index) => {
    const name = known[index] === null ? element("code", field) : element("button", field, [], { type: "button", class: "to" });
    name.addEventListener("click", () => {
      if (known[index] === null) return;
      document.querySelector('.tabs a[href="#form-panel"]').click();
      form.show(known[index]);
    });
    return element("li", "", [name, `: ${message}`]);
  });
  problem.replaceChildren(element("strong", "Refused"), element("ul", "", items));
}

/** The form follows the text: until it does it waits, as what it says of other fields would be taken for an edit. */
async function pull() {
  const asked = text.value;
  const { signal } = looking;
  const result = await ask("/submit/text", { text: asked }, signal);
  if (signal.aborted || asked !== text.value || ahead()) return;
  follow(result);
  if (away(result)) again(pull, look);
}

function follow(result) {
  if (away(result)) return;
  fields.inert = !result.ok;
  odd.hidden = result.ok;
  if (result.ok) form.fill(result.answer.document);
  else odd.textContent = `The form waits: ${result.answer?.errors?.[0]?.message ?? result.answer?.detail ?? "no answer"}`;
}

/** The text follows the form. */
async function push() {
  if (pushing) return;
  pushing = true;
  text.readOnly = true; // for the moment of the request: what is typed now would be lost
  let result = null;
  while (form.dirty) {
    result = await ask("/submit/text", { text: text.value, edits: form.take() });
    if (!result.ok) break;
    text.value = result.answer.text;
    form.fill(result.answer.document);
  }
  text.readOnly = false;
  pushing = false;
  if (result !== null && away(result)) {
    form.putBack();
    refuse(result);
    tell("Not looked at.");
    again(push);
    return;
  }
  if (result !== null && !result.ok) {
    follow(result);
    setTimeout(pull, 2000); // what the form says is not in the text: it shows again what is
  }
  await look();
}

function later(pause, ...works) {
  clearTimeout(timer);
  waiting = null;
  timer = setTimeout(() => works.forEach((work) => work()), pause);
}

/** Does so again where the service is away: ever later, and at once for who comes back to the page, having signed in. */
function again(...works) {
  const all = () => {
    waiting = null;
    missed += 1;
    works.forEach((work) => work());
  };
  later(patience(missed + 1), all);
  waiting = all;
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden || waiting === null) return;
  clearTimeout(timer);
  waiting();
});

/** Keeps the text with this entry of the browser's history: it is here again after a reload, or on the way back. */
function keep() {
  history.replaceState({ ...history.state, spec: text.value, posted }, "");
}

/** Says of a text that it was posted before: who came back to it stores it once more only if that is what they want. */
function tellPosted(experiment) {
  if (submit) submit.textContent = experiment === undefined ? "Submit" : "Submit once more";
  if (experiment === undefined) return;
  const where = element("a", `experiment ${experiment}`, [], { href: `/experiments/${experiment}` });
  stored.replaceChildren(element("p", "This is ", [where, ", as it was posted."]));
  stored.hidden = false;
}

/** Posts the text that was looked at, and no other. */
async function post() {
  if (posting || looked === null || looked.text !== text.value || ahead()) return;
  const { text: body, key } = looked;
  posted = looked;
  keep(); // a second try after a reload has its key, too
  posting = true;
  document.body.setAttribute("aria-busy", "true");
  settle();
  const result = await send("POST", "/v1/experiments", { body, type: typeOf(body), headers: { "Idempotency-Key": key } });
  document.body.removeAttribute("aria-busy");
  posting = false;
  settle();
  if (!result.ok) {
    refuse(result);
    problem.focus();
    return;
  }
  posted = { text: body, key, experiment: Number(result.answer.id) };
  keep();
  const address = `/experiments/${posted.experiment}`;
  const warnings = warned(result.answer.warnings);
  if (warnings.length === 0) {
    location.assign(address);
    return;
  }
  const where = element("a", `experiment ${posted.experiment}`, [], { href: address });
  stored.replaceChildren(element("h3", "Stored"), element("p", "As ", [where, "."]), ...warnings);
  stored.hidden = false;
  where.focus();
}

const form = new SpecForm(fields, () => {
  changed();
  later(PAUSE, push);
});
text.addEventListener("input", () => {
  if (!ahead()) fields.inert = true;
  changed();
  later(PAUSE, ...(ahead() ? [push] : [pull, look]));
});
list.addEventListener("toggle", () => {
  if (!list.open || ahead()) return; // the form's changes are looked at when they are in the text
  changed();
  pull();
  look();
});
document.getElementById("start").addEventListener("submit", (event) => {
  if (text.value !== text.defaultValue && !window.confirm("Begin anew? What is written here is lost.")) event.preventDefault();
});
if (submit) {
  document.getElementById("send").hidden = false;
  submit.addEventListener("click", post);
}
text.value = history.state?.spec ?? text.value;
changed();
pull();
look();
