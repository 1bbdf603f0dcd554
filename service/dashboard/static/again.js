// The page of an error that passes by itself: looks until what was asked for is there, and shows that.
import { element } from "/static/request.js";

const seconds = Number(document.body.dataset.again);

async function look() {
  try {
    const { status } = document.hidden
      ? { status: 503 } // nobody waits for it
      : await fetch(location.href, { headers: { Accept: "text/html" }, credentials: "same-origin" });
    if (status !== 503) {
      location.reload();
      return;
    }
  } catch {
    // Nobody answers at all.
  }
  setTimeout(look, 1000 * seconds);
}

const words = `This page looks again every ${seconds} seconds, and shows what you asked for once it is there.`;
document.querySelector("[role=alert]").after(element("p", words));
setTimeout(look, 1000 * seconds);
