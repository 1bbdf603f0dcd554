// The panel of an experiment's matrix: what is chosen in it, asked for again and drawn anew. The server chose what is in it.
import { Matrix } from "/static/matrix.js";
import { printing } from "/static/paper.js";
import { isAway, patience, showProblem } from "/static/request.js";
import { fileName, save } from "/static/save.js";
import { onScheme } from "/static/theme.js";
import { hideTip } from "/static/tip.js";

const RELOAD = 4000;

let shown = null; // what is drawn now
const panel = document.getElementById("matrix");

function draw() {
  const figure = panel?.querySelector(".matrix-figure");
  const data = panel?.querySelector(".matrix-data");
  shown?.dispose();
  shown = null;
  if (!figure || !data || !(printing() || panel.classList.contains("current"))) return;
  const read = JSON.parse(data.textContent);
  if (read.places.trial.length > 0) shown = new Matrix(figure, read);
}

let choices = 0;
let searched = location.search; // what was chosen last

/** What in the panel somebody may have been at, told from one panel to the next by its name or its text. */
const doing = (one) => one?.name || `${one?.tagName} ${one?.textContent}`;
const alike = (one) => [...panel.querySelectorAll("a, button, input, select, summary")].filter((other) => doing(other) === doing(one));

/** Leads to an address; to the one that is here, which a part of the page may end, by reading it anew. */
function go({ href }) {
  if (href === location.href) location.reload();
  else location.assign(href);
}

/** Exchanges what the panel has; with `stays`, a form in which nothing changed stays, and what is being written in it. */
function exchange(fresh, stays) {
  const [form, other] = [panel, fresh].map((one) => one.querySelector(".chooser"));
  if (!stays || form === null || !form.isEqualNode(other)) {
    panel.replaceChildren(...fresh.childNodes);
    return;
  }
  while (form.nextSibling) form.nextSibling.remove();
  while (other.nextSibling) panel.append(other.nextSibling);
}

/**
 * Exchanges the panel for another choice of fields; the form keeps its focus. Only the newest choice counts. What is
 * `live` nobody chose: the matrix goes on where it stood. Throws where the service does not answer that.
 */
async function choose(address, { push = true, live = false } = {}) {
  const mine = ++choices;
  panel.setAttribute("aria-busy", "true");
  const home = location.pathname.replace(/\/$/, "");
  try {
    const response = await fetch(`${home}/matrix${address.search}`, { headers: { Accept: "application/json" } });
    const text = await response.text();
    if (mine !== choices) return;
    if (live && isAway(response)) throw new Error(text);
    if (response.status === 422) {
      showProblem(panel.querySelector(".alarm"), { status: 422, answer: JSON.parse(text) });
      return;
    }
    if (!response.ok) {
      // What nobody chose leads nobody away from what they read.
      if (!live) go(address);
      return;
    }
    const fresh = new DOMParser().parseFromString(text, "text/html");
    hideTip();
    const [before, active] = [shown, document.activeElement];
    const place = alike(active).indexOf(active);
    const opened = panel.querySelector(".behind")?.open;
    exchange(fresh.getElementById("matrix"), live);
    if (push) {
      history.pushState(null, "", address.href);
      searched = location.search;
    }
    draw();
    panel.querySelector(".behind")?.toggleAttribute("open", opened);
    if (live && before !== null) shown?.follow(before);
    if (active?.isConnected) return;
    if (active === before?.place) shown?.place.focus({ preventScroll: true });
    else alike(active)[place]?.focus({ preventScroll: true });
  } catch (error) {
    if (mine !== choices) return;
    if (live) throw error;
    go(address);
  } finally {
    if (mine === choices) panel.removeAttribute("aria-busy");
  }
}

function addressOf(form) {
  const address = new URL(location.href);
  const mine = new Set([...form.elements].map((one) => one.name).filter(Boolean));
  for (const name of mine) address.searchParams.delete(name);
  for (const [name, value] of new FormData(form)) if (value !== "") address.searchParams.append(name, value);
  return address;
}

/** Reads the places of trials again, or all of them. Throws where the service does not answer, or somebody chooses. */
async function update(trials) {
  noneChosen();
  if (shown === null) {
    // There were no trials yet.
    if (trials === null) await choose(new URL(location.href), { push: false, live: true });
    return;
  }
  const { experiment, metric, x, y } = shown.data;
  const asked = new URLSearchParams(location.search);
  const query = new URLSearchParams({ metric, seeds: asked.get("seeds") ?? "mean" });
  for (const one of asked.getAll("where")) query.append("where", one);
  const here = shown;
  if (trials !== null) {
    query.set("trials", trials.join(","));
    const response = await fetch(`/v1/experiments/${experiment}/matrix?${query}`, { headers: { Accept: "application/json" } });
    if (isAway(response)) throw new Error(await response.text());
    if (!response.ok) return;
    const found = await response.json();
    if (shown !== here || shown.patch(found)) return;
  }
  if (x.field) query.set("x", x.field);
  if (y.field) query.set("y", y.field);
  noneChosen();
  await choose(new URL(`?${query}${location.hash}`, location.href), { push: false, live: true });
}

/** Something else is being read. */
class Busy extends Error {}

/** Throws while what somebody just chose is on its way, which may have been read before what changed since. */
function noneChosen() {
  if (panel.hasAttribute("aria-busy")) throw new Busy();
}

if (panel) {
  panel.addEventListener("change", (event) => {
    const { form, name, value } = event.target;
    if (!form?.classList.contains("chooser")) return;
    const other = { x: "y", y: "x" }[name];
    if (other && form.elements[other].value === value) form.elements[other].value = shown?.data[name].field ?? "";
    choose(addressOf(form));
  });
  panel.addEventListener("submit", (event) => {
    event.preventDefault();
    choose(addressOf(event.target));
  });
  panel.addEventListener("click", (event) => {
    if (event.target.closest("button[data-none]")) shown?.chooseNone();
    const kind = event.target.closest("button[data-save]")?.dataset.save;
    if (!kind || shown === null) return;
    const name = fileName("matrix", shown.data.experiment, shown.data.metric);
    if (kind === "svg") save(`${name}.svg`, shown.picture("svg"), "image/svg+xml");
    else save(`${name}.png`, shown.picture("canvas"));
  });
  panel.addEventListener("shown", () => {
    if (shown === null) draw();
    else if (shown.stale) shown.draw();
    later(0);
  });
  addEventListener("popstate", () => {
    if (location.search === searched) return; // another tab alone
    searched = location.search;
    choose(new URL(location.href), { push: false });
  });
  let width = panel.clientWidth;
  new ResizeObserver(() => {
    if (panel.clientWidth === width || panel.clientWidth === 0) return;
    width = panel.clientWidth;
    shown?.draw();
  }).observe(panel);
  onScheme(() => (shown === null && printing() ? draw() : shown?.draw()));

  const waiting = new Set();
  let timer = null; // until its answer is taken in: none comes after that of a later one
  let whole = false;
  let missed = 0; // answers in a row that did not come
  let patient = false; // nothing is being read: it waits for the service to be there again
  /** Has what changed read after a pause; where no matrix is drawn, and none to be seen, once it is. */
  const later = (pause) => {
    if ((waiting.size === 0 && !whole) || (shown === null && !panel.classList.contains("current"))) return;
    timer ??= setTimeout(async () => {
      patient = false;
      const [all, trials] = [whole || waiting.size > 500, [...waiting]];
      waiting.clear();
      whole = false;
      let next = 1000;
      try {
        await update(all ? null : trials);
        missed = 0;
      } catch (error) {
        for (const trial of trials) waiting.add(trial); // the service is away for a moment
        whole ||= all;
        patient = true;
        next = patience(error instanceof Busy ? 1 : (missed += 1));
      }
      timer = null;
      later(next);
    }, pause);
  };
  document.addEventListener("answered", () => {
    if (!patient) return;
    clearTimeout(timer);
    timer = null;
    later(0);
  });
  document.addEventListener("trials-changed", ({ detail }) => {
    for (const trial of detail.trials) waiting.add(trial);
    if (detail.all) whole = true;
    later(whole ? RELOAD : 1000);
  });
  draw();
}
