// Forms in dialogs: each sends JSON to the API, shows what is wrong beside its fields, and leads to what came of it.
import { count } from "/static/numbers.js";
import { newKey, send, showProblem } from "/static/request.js";

/** Values as people write them in a line: JSON where it is, else texts. */
function listed(text) {
  try {
    return JSON.parse(`[${text}]`);
  } catch {
    return text.split(",").filter((one) => one.trim() !== "").map(valued);
  }
}

function valued(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text.trim();
  }
}

const KINDS = {
  text: (text) => text,
  number: (text) => (text === "" ? undefined : Number(text)),
  words: (text) => text.split(",").map((word) => word.trim()).filter(Boolean),
  values: (text) => (text.trim() === "" ? undefined : listed(text)),
  pairs: (text) =>
    Object.fromEntries(
      text.trim().split(/\s+/).filter(Boolean).map((pair) => {
        const at = pair.indexOf("=");
        return at < 0 ? [pair, true] : [pair.slice(0, at), valued(pair.slice(at + 1))];
      }),
    ),
};

/** What a form says, by the names of its fields; `grid.rank` stands within `grid`. */
function body(form) {
  const found = {};
  for (const field of form.elements) {
    if (!field.name) continue;
    if (form.dataset.changes !== undefined && field.value === field.defaultValue) continue; // another's edit may be newer
    const value = KINDS[field.dataset.kind ?? "text"](field.value);
    if (value === undefined || (value === "" && field.dataset.optional !== undefined)) continue;
    const [part, path] = field.name.startsWith("grid.") ? ["grid", field.name.slice(5)] : [null, field.name];
    if (part === null) found[path] = value;
    else (found[part] ??= {})[path] = value;
  }
  return found;
}

/** Where the page says how many trials there are, those that somebody else added since it was read among them. */
const counted = () => document.querySelector("#summary [data-trials]");

/** What came of it: of an extension how many trials, beside those that were there before. */
function outcome(form, before, { trial_count: trials }) {
  if (form.dataset.grows === undefined) return "Done.";
  counted().dataset.trials = trials;
  return trials > before ? `${count(trials - before, "trial")} added.` : "Nothing added: all of its trials are there already.";
}

/** What somebody else changed since the page was read stands in a form of changes, but where another text is written by now. */
async function renew(dialog) {
  const response = await fetch(location.pathname, { headers: { Accept: "text/html" }, credentials: "same-origin" }).catch(() => null);
  if (!response?.ok || response.redirected) return;
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  if (!dialog.open) return; // what was sent meanwhile is newer
  for (const field of dialog.querySelector("form").elements) {
    const now = field.name && page.querySelector(`#${dialog.id} [name="${field.name}"]`)?.defaultValue;
    if (typeof now === "string" && field.name && field.value === field.defaultValue) field.value = field.defaultValue = now;
  }
}

document.addEventListener("click", (event) => {
  const opener = event.target.closest("button[data-dialog]");
  if (opener) {
    const dialog = document.getElementById(opener.dataset.dialog);
    dialog.querySelector(".alarm").hidden = true;
    dialog.showModal();
    if (dialog.querySelector("form[data-changes]")) renew(dialog);
  }
  if (event.target.closest("button[data-close]")) {
    event.target.form.reset();
    event.target.closest("dialog").close();
  }
});

const sent = new Map(); // by form: what had no good answer yet, and the key under which it makes no second of it

document.addEventListener("submit", async (event) => {
  const form = event.target.closest("form[data-send]");
  if (form === null) return;
  event.preventDefault();
  if (form.getAttribute("aria-busy") === "true") return;
  const problem = form.querySelector(".alarm");
  const [method, address] = form.dataset.send.split(" ");
  form.setAttribute("aria-busy", "true");
  const before = Number(counted().dataset.trials);
  const text = JSON.stringify(body(form));
  if (sent.get(form)?.text !== text) sent.set(form, { text, key: newKey() });
  const result = await send(method, address, { body: text, headers: { "Idempotency-Key": sent.get(form).key } });
  form.removeAttribute("aria-busy");
  if (!result.ok) {
    showProblem(problem, result);
    return;
  }
  sent.delete(form);
  form.closest("dialog").close(); // and no second click meets it on the way to what was made
  const here = document.body.dataset.experiment;
  if (String(result.answer.id) !== here) {
    location.assign(`/experiments/${Number(result.answer.id)}`);
    return;
  }
  for (const field of form.elements) {
    if (field.name && form.dataset.changes !== undefined) field.defaultValue = field.value;
    else if (field.name) field.value = field.defaultValue;
  }
  const heading = document.querySelector("h1");
  document.title = document.title.replace(heading.textContent, () => result.answer.name);
  heading.textContent = result.answer.name;
  const said = document.getElementById("action-said");
  said.textContent = outcome(form, before, result.answer);
  said.hidden = false;
  document.dispatchEvent(new CustomEvent("acted"));
});
