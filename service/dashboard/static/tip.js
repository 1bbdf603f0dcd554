// What stands beside the pointer: texts of others are texts here, of any length and direction.
import { element } from "/static/request.js";

const tip = element("div", "", [], { class: "tip", "aria-hidden": "true", hidden: "" });
document.body.append(tip);

/** Shows lines at a place of the window; the first is the heading. */
export function showTip(x, y, lines) {
  tip.replaceChildren(
    ...lines.filter(Boolean).map((line, index) =>
      element("p", String(line), [], { dir: "auto", ...(index === 0 ? { class: "head" } : {}) }),
    ),
  );
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = x + 16 + width > innerWidth - 8 ? x - 16 - width : x + 16;
  const top = y + 16 + height > innerHeight - 8 ? y - 16 - height : y + 16;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${Math.max(8, top)}px`;
}

/** Takes it away. */
export function hideTip() {
  tip.hidden = true;
}

addEventListener("scroll", hideTip, { passive: true });
