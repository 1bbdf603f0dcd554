// Keeps a page up to date by its stream: what changed is asked for, and nothing else. The server writes all HTML.
import { element, isAway, patience } from "/static/request.js";

const PAUSE = 1500; // at most one reading in so many milliseconds
const WHOLE = 10000; // at most one reading of a whole page
const MINUTE = 60000;
const OPEN = new Set(["queued", "running", "paused"]);
const RESHAPING = new Set(["retried", "extended", "cancelled", "stopping", "resumed", "trial_suggested", "reaped"]);

/** Puts fresh children into an element; what is open stays so, and the focus with the button, link or field that had it. */
function exchange(old, fresh) {
  if (old.innerHTML === fresh.innerHTML) return;
  const active = old.contains(document.activeElement) ? document.activeElement : null;
  const key = active && keyOf(active);
  const nth = active ? focusable(old).indexOf(active) : -1;
  for (const box of old.querySelectorAll("input[type=checkbox]:checked")) {
    const same = fresh.querySelector(`input[name="${box.name}"][value="${CSS.escape(box.value)}"]`);
    if (same) same.checked = true;
  }
  const folds = (within) => [...within.querySelectorAll("details")].map((one) => [one.querySelector("summary").textContent, one]);
  const opened = new Map(folds(old).map(([said, { open: isOpen }]) => [said, isOpen]));
  for (const [said, one] of folds(fresh)) one.open = opened.get(said) ?? one.open;
  const scrolled = [...old.querySelectorAll(".wide, pre")].map((one) => [one.scrollLeft, one.scrollTop]);
  old.replaceChildren(...fresh.childNodes);
  [...old.querySelectorAll(".wide, pre")].forEach((one, index) => {
    if (scrolled[index]) [one.scrollLeft, one.scrollTop] = scrolled[index];
  });
  if (active === null) return;
  const now = focusable(old);
  const same = key === null ? undefined : now.find((one) => keyOf(one) === key);
  (same ?? now[Math.min(nth, now.length - 1)])?.focus({ preventScroll: true });
}

/** By what an element is known again: a box by its value, too, as all of a list have one name. */
function keyOf(one) {
  const box = one.type === "checkbox" ? `=${one.value}` : "";
  return one.dataset.action ?? one.getAttribute("href") ?? (one.name ? one.name + box : null);
}

function focusable(within) {
  return [...within.querySelectorAll("a[href], button, input, select, textarea, summary, [tabindex]")];
}

/** The service is away for a moment: its stream connects again by itself, and what was not read is asked for again. */
class Away extends Error {}

let turns = 0; // that something was asked
let judged = 0; // the latest turn whose answer was heard: what was asked before it and is answered later tells nothing new

/** What the service answers to a request for such a type; null where it refuses, which the page says. Throws `Away`. */
async function ask(address, type) {
  const turn = (turns += 1);
  try {
    const response = await fetch(address, { headers: { Accept: type }, credentials: "same-origin" });
    if (!isAway(response)) {
      judge(turn, response);
      return response.ok && !response.redirected ? await response.text() : null;
    }
  } catch {
    // Nobody answers, or the answer breaks off.
  }
  miss();
  throw new Away();
}

const SIGNED_OUT = "You are signed out: what stands here is not kept up to date.";
const AWAY = "The service does not answer. What stands here was read before, and will be kept up to date once it does.";
let standing = null; // what the page says of itself: that it is not kept up to date, and what to do
let gone = false; // what it shows was deleted
let missed = 0; // answers in a row that did not come

/** Says that the service is away where it is so for longer than a moment. */
function miss() {
  missed += 1;
  if (missed > 1) say(AWAY, "Try now", location.pathname + location.search + location.hash);
}

/** Says where nobody is signed in any more, or what the page shows is no more; and takes back what it said. */
function judge(turn, { status, redirected, url }) {
  if (missed > 0) {
    missed = 0;
    document.dispatchEvent(new CustomEvent("answered")); // who waits to ask again need not
  }
  if (turn < judged) return;
  judged = turn;
  if (status === 401 || (redirected && new URL(url).pathname === "/login")) {
    const next = location.pathname + location.search + location.hash;
    say(SIGNED_OUT, "Sign in", `/login?${new URLSearchParams({ next })}`);
  } else if (status === 404) {
    gone = true;
    hush();
    say("This is there no more: it was deleted. What stands here was read before.", "Experiments", "/");
  } else if (status < 400) {
    standing?.remove();
    standing = null;
  }
}

function say(words, link, href) {
  if (standing?.dataset.said === words) return;
  standing?.remove();
  const there = element("a", link, [], { href });
  // To an address that names a part of the page a link leads without reading it.
  if (words === AWAY) there.addEventListener("click", () => location.reload());
  standing = element("p", `${words} `, [there], { class: "alarm", role: "alert", "data-said": words });
  document.getElementById("main").prepend(standing);
}

/** Another page of ours as a document; null where there is none to be had. Throws `Away`. */
async function read(address) {
  const text = await ask(address, "text/html");
  return text === null ? null : new DOMParser().parseFromString(text, "text/html");
}

/**
 * Calls `work` soon, but not again before it is done and `pause` is over; by `now()` at once, for who waits for what they
 * did themselves.
 */
function throttled(work, pause) {
  let timer = null;
  let busy = false;
  let again = null;
  let waiting = false; // for the service to be there again
  const run = async () => {
    timer = null;
    waiting = false;
    busy = true;
    try {
      await work();
    } catch (error) {
      if (!(error instanceof Away)) throw error;
      again ??= () => {
        waiting = true;
        timer = setTimeout(run, patience(missed));
      };
    } finally {
      busy = false;
      const next = again;
      again = null;
      next?.();
    }
  };
  const soon = () => {
    if (busy) again ??= soon;
    else timer ??= setTimeout(run, pause);
  };
  soon.now = () => {
    clearTimeout(timer);
    if (busy) again = soon.now;
    else run();
  };
  document.addEventListener("answered", () => waiting && soon.now());
  return soon;
}

/** Reads the page again, or one with a part of it, and exchanges what is marked `data-live`. */
export async function refresh(only = "[data-live]", address = location.href) {
  const fresh = await read(address);
  if (fresh === null) return;
  for (const old of document.querySelectorAll(only)) {
    const part = fresh.getElementById(old.id);
    if (part) exchange(old, part);
  }
  document.dispatchEvent(new CustomEvent("refreshed"));
}

const { stream, rest, after, changes, open, trial, at } = document.body.dataset;
let over = open === undefined; // a stream of what is over would end at once
let source = null;
let newest = Number(after ?? 0);
let refusals = 0;

/**
 * Listens to a stream in place of the one before. A browser connects again by itself where a stream breaks off, and
 * never where it is refused, as while the database or what stands before the service is away: then `again` does.
 */
function listen(address, handlers, again) {
  hush();
  if (gone || document.hidden) return;
  let turn = (turns += 1);
  const mine = new EventSource(address);
  source = mine;
  for (const [name, handle] of Object.entries(handlers)) {
    mine.addEventListener(name, (event) => handle(JSON.parse(event.data)));
  }
  mine.addEventListener("open", () => {
    refusals = 0;
    judge(turn, { status: 200 });
  });
  mine.addEventListener("error", () => {
    if (mine.readyState !== EventSource.CLOSED) {
      turn = turns += 1; // it connects again
      miss();
      return;
    }
    refusals += 1;
    setTimeout(() => mine === source && again(), patience(refusals));
  });
}

/** Listens no more. */
function hush() {
  source?.close();
  source = null;
}

/**
 * Listens while somebody looks at the page, and reads where they come back to it. A browser has six connections to a
 * service for all tabs together: pages in the background that held one each would leave none to open another by.
 */
function whileSeen(connect, reading) {
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) reading.now();
    connect();
  });
  connect();
}

/** Listens to what is over: that it is deleted, whereupon the stream is refused, or that it goes on. */
function listenOn(progress, reading) {
  listen(rest, { progress }, () => {
    reading(); // says that it was deleted
    listenOn(progress, reading);
  });
}

/** The page of an experiment. */
function ofExperiment() {
  const stale = new Set();
  let told = 0; // the newest event that the stream told of
  // The list stays of what it was asked for, whatever is chosen of the matrix later.
  const listed = location.href;
  const rows = throttled(() => refresh("#trials", listed), WHOLE);
  const soon = throttled(async () => {
    const query = new URLSearchParams({ after: newest });
    const columns = document.querySelector("#trials form")?.dataset.columns; // those of the table as it is now
    if (columns) query.set("columns", columns);
    const shown = [...stale].filter((id) => document.querySelector(`tr[data-trial="${id}"]`));
    for (const id of shown.slice(0, 200)) query.append("trials", id);
    stale.clear();
    const fresh = await read(`${changes}?${query}`).catch((error) => {
      for (const id of shown) stale.add(id);
      throw error;
    });
    if (fresh === null) return;
    const heading = document.getElementById("heading");
    const named = heading.textContent;
    for (const part of fresh.querySelectorAll("#heading, #summary, #verbs, #spec")) exchange(document.getElementById(part.id), part);
    document.title = document.title.replace(named, () => heading.textContent); // in another tab it was called so
    for (const row of fresh.querySelectorAll("#rows > tr")) {
      const old = document.querySelector(`tr[data-trial="${row.dataset.trial}"]`);
      if (old) exchange(old, row);
    }
    const events = document.getElementById("events");
    const known = events.rows[0]?.dataset.event ?? 0;
    const later = [...fresh.querySelectorAll("#new-events > tr")].filter((row) => Number(row.dataset.event) > known);
    events.prepend(...later);
    while (events.rows.length > 200) events.deleteRow(-1);
    newest = Math.max(newest, Number(events.rows[0]?.dataset.event ?? 0));
    if (newest < told) soon(); // so many happened that they are not read at once
  }, PAUSE);
  const changed = (trials, all = false) => {
    for (const id of trials) stale.add(id);
    document.dispatchEvent(new CustomEvent("trials-changed", { detail: { trials, all } }));
    if (all) rows();
    soon();
  };
  const handlers = {
    progress: () => {
      document.dispatchEvent(new CustomEvent("progressed"));
      soon();
    },
    trials: ({ ids }) => changed(ids),
    event: ({ id, trial_id: trial, kind }) => {
      told = Math.max(told, id);
      changed(trial === null ? [] : [trial], RESHAPING.has(kind));
    },
    end: () => {
      over = true;
      connect();
      soon();
    },
  };
  const goesOn = ({ state }) => {
    if (!OPEN.has(state)) return;
    over = false;
    connect();
  };
  const connect = () => {
    if (over) {
      listenOn(goesOn, soon);
      return;
    }
    listen(`${stream}&after=${newest}`, handlers, () => {
      soon(); // says why it was refused
      connect();
    });
  };
  document.addEventListener("acted", () => {
    over = false;
    soon.now();
    connect();
  });
  whileSeen(connect, soon);
}

/** The page of a trial: what the experiment's other trials do is no reason to read it. */
function ofTrial() {
  let known = at; // what the page says of the trial
  const summary = () => refresh("#summary", `/trials/${trial}/summary`);
  const silent = throttled(summary, 0);
  setInterval(() => document.hidden || over || silent(), MINUTE); // of a trial that reports nothing nobody tells
  const look = async () => {
    const found = await ask(`/v1/trials/${trial}?fields=state,epoch,attempts`, "application/json");
    if (found === null) return;
    const { state, epoch, attempts } = JSON.parse(found);
    const now = `${state} ${epoch} ${attempts}`;
    if (now === known) return;
    const done = state !== "running" && state !== "queued";
    // While it trains nothing changes but what stands above the tabs; they read their own numbers.
    if (done || over || String(attempts) !== known.split(" ")[2]) await refresh();
    else await summary();
    document.dispatchEvent(new CustomEvent("progressed"));
    known = now;
    if (done === over) return;
    over = done; // it ended, or is tried again
    connect();
  };
  const soon = throttled(look, PAUSE);
  let ended = 0;
  /** Looks where fewer trials are over than were: this one may be among those that are tried again. */
  const goesOn = ({ progress }) => {
    const { queued, running, ...final } = progress.trials;
    const before = ended;
    ended = Object.values(final).reduce((sum, count) => sum + count, 0);
    if (ended < before) soon();
  };
  const connect = () => {
    if (over) {
      listenOn(goesOn, soon);
      return;
    }
    const end = () => {
      over = true;
      connect();
      soon();
    };
    listen(stream, { progress: soon, end }, () => {
      soon(); // says why it was refused
      connect();
    });
  };
  whileSeen(connect, soon);
}

/** What the stream tells of an experiment, as its row is marked with it. */
const progressed = ({ state, progress, waiting }) => `${state} ${Object.values(progress.trials).join(",")} ${progress.epochs_done} ${waiting ?? ""}`;
const rowOf = (id, within = document) => within.querySelector(`tr[data-experiment="${id}"]`);

/** The list of experiments, and the pool: rows of those that got on are exchanged, and all where there are others. */
function ofList() {
  const { pool, rows: address } = document.body.dataset;
  const pause = pool === undefined ? PAUSE : WHOLE / 2;
  const stale = new Set();
  const whole = throttled(async () => {
    stale.clear();
    await refresh();
    connect();
  }, pause);
  const single = throttled(async () => {
    if (stale.size === 0) return;
    const query = new URLSearchParams(location.search);
    const asked = [...stale];
    for (const id of asked) query.append("experiment", id);
    stale.clear();
    const fresh = await read(`${address}?${query}`).catch((error) => {
      for (const id of asked) stale.add(id);
      throw error;
    });
    if (fresh === null) return;
    for (const row of fresh.querySelectorAll("tr[data-experiment]")) {
      const old = rowOf(row.dataset.experiment);
      if (old === null) continue;
      exchange(old, row);
      old.dataset.progress = row.dataset.progress;
    }
    for (const part of fresh.querySelectorAll("[data-live]")) exchange(document.getElementById(part.id), part);
    document.dispatchEvent(new CustomEvent("refreshed"));
  }, pause);
  if (pool !== undefined) setInterval(() => document.hidden || whole(), MINUTE); // machines come and go by themselves
  let known = Number(document.body.dataset.newest);
  let heard = null;
  /** Listens to the experiments that are listed now: new ones as well, and none that is there no more. */
  const connect = () => {
    const ids = [...document.querySelectorAll("tr[data-experiment]")].map((row) => row.dataset.experiment).sort();
    const address = `${stream}?${new URLSearchParams(ids.map((id) => ["experiment", id]))}`;
    if (address === heard && source !== null && !document.hidden) return;
    heard = address;
    listen(address, { posted, progress }, () => {
      heard = null;
      whole(); // one of them may have been deleted
    });
  };
  const posted = ({ id }) => {
    if (id !== known) whole();
    known = id;
  };
  const progress = (update) => {
    const row = rowOf(update.id);
    if (row === null || row.dataset.progress === progressed(update)) return;
    if (pool !== undefined && !OPEN.has(update.state)) {
      whole(); // what is over leaves the pool
      return;
    }
    stale.add(update.id);
    single();
  };
  whileSeen(connect, whole);
}

if (changes !== undefined) ofExperiment();
else if (trial !== undefined) ofTrial();
else if (stream !== undefined) ofList();
