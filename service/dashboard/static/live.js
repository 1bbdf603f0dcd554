// Keeps a page up to date: when the experiment's stream says that something changed, the page is read again and the
// parts marked data-live are exchanged. The server writes all HTML; nothing is built from data here.

const PAUSE = 1500; // at most one reading in so many milliseconds
const POLL = 15000;
let timer = null;
let reading = false;
let again = false;

async function refresh() {
  if (reading) {
    again = true;
    return;
  }
  reading = true;
  try {
    const response = await fetch(location.href, { headers: { Accept: "text/html" }, credentials: "same-origin" });
    if (!response.ok || response.redirected) return;
    const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
    for (const old of document.querySelectorAll("[data-live]")) {
      const part = fresh.getElementById(old.id);
      const held = old.contains(document.activeElement) && document.activeElement !== document.body;
      if (part && !held && part.innerHTML !== old.innerHTML) old.replaceChildren(...part.childNodes);
    }
  } catch {
    // The service is away for a moment: the stream connects again by itself, and the next change is read then.
  } finally {
    reading = false;
    if (again) {
      again = false;
      soon();
    }
  }
}

function soon() {
  if (timer === null) {
    timer = setTimeout(() => {
      timer = null;
      refresh();
    }, PAUSE);
  }
}

const { stream, poll } = document.body.dataset;
if (stream) {
  const source = new EventSource(stream);
  source.addEventListener("progress", soon);
  source.addEventListener("event", soon);
  source.addEventListener("end", () => {
    source.close();
    soon();
  });
} else if (poll !== undefined) {
  setInterval(() => {
    if (!document.hidden) refresh();
  }, POLL);
}
