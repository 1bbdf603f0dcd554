// Paper: a page that is printed has every part, at the width of a sheet and in the light colours.

// Browsers print what stands there when `beforeprint` is over: nothing that has to be waited for comes onto the paper.
const print = matchMedia("print");
const calls = [];
export const FINE = 3; // so many points of what is drawn for paper to one of the screen
let on = false;

/** Whether the page stands as it is printed now. */
export const printing = () => on;

/** Calls when the page was laid out for paper, and again when it is laid out for the screen. */
export function onPaper(call) {
  calls.push(call);
  if (on) queueMicrotask(() => call(on));
}

function lay(now) {
  if (on === now) return;
  on = now;
  document.documentElement.classList.toggle("paper", on);
  for (const one of document.querySelectorAll(on ? "details:not([open])" : "details[data-closed]")) {
    one.open = on;
    one.toggleAttribute("data-closed", on);
  }
  if (!on) for (const sheet of document.querySelectorAll(".sheet")) sheet.remove();
  for (const call of calls) call(on);
}

/** Asks the API for a path: at once on the way to paper, else in time. {status, answer}; 0 where nobody answers. */
export async function read(path) {
  try {
    if (!on) {
      const response = await fetch(path, { headers: { Accept: "application/json" }, credentials: "same-origin" });
      return { status: response.status, answer: await response.json() };
    }
    const request = new XMLHttpRequest();
    request.open("GET", path, false);
    request.setRequestHeader("Accept", "application/json");
    request.send();
    return { status: request.status, answer: JSON.parse(request.responseText) };
  } catch {
    return { status: 0, answer: null };
  }
}

/**
 * Puts what a chart of ECharts shows beside its place, for paper alone: finer than a screen, and where it is high in
 * pieces, cut at these heights, between which a page may end.
 */
export function onSheet(place, chart, cuts = []) {
  const sheets = [];
  if (on) {
    const whole = chart.renderToCanvas({ pixelRatio: FINE });
    const ends = [...cuts, whole.height / FINE];
    ends.forEach((end, index) => {
      const begin = index === 0 ? 0 : ends[index - 1];
      const canvas = document.createElement("canvas");
      canvas.className = "sheet";
      canvas.setAttribute("aria-hidden", "true");
      canvas.width = whole.width;
      canvas.height = (end - begin) * FINE;
      canvas.getContext("2d").drawImage(whole, 0, -begin * FINE);
      sheets.push(canvas);
    });
  }
  for (const old of place.parentElement.querySelectorAll(":scope > .sheet")) old.remove();
  place.after(...sheets);
}

addEventListener("beforeprint", () => lay(true));
addEventListener("afterprint", () => lay(print.matches));
print.addEventListener("change", () => lay(print.matches));
lay(print.matches);
