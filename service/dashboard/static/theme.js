// What is drawn on a canvas: colours of the style sheet, which follow the light and the dark scheme, and paper.
import { onPaper, printing } from "/static/paper.js";

const VIRIDIS = "440154 482475 414487 355f8d 2a788e 21918c 22a884 44bf70 7ad151 bddf26 fde725"
  .split(" ")
  .map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));

const dark = matchMedia("(prefers-color-scheme: dark)");
let probe = null;
let known = new Map();

/** A colour of the style sheet by its role (`text`, `line`, `running`), as the scheme has it now. */
export function colour(role) {
  if (!known.has(role)) {
    if (probe === null) {
      probe = document.createElement("span");
      probe.hidden = true;
      probe.style.forcedColorAdjust = "none"; // in forced colours, too, roles are told apart by theirs
      document.body.append(probe);
    }
    probe.style.color = `var(--${role})`;
    known.set(role, getComputedStyle(probe).color);
  }
  return known.get(role);
}

// Okabe and Ito's colours, which colour-blind eyes tell apart, darker or lighter than they printed them.
const LIGHT = ["#0072b2", "#c04d00", "#00805c", "#a8498a", "#8a6d00", "#2b8fcf", "#5b5b5b"];
const DARK = ["#56b4e9", "#ff9e4a", "#2fc296", "#e08ac2", "#f0e442", "#8ecbff", "#c0c0c0"];

/** Whether lines are bright on a dark page: never on paper. */
export const isDark = () => dark.matches && !printing();

/** Colours of lines and marks that stand beside each other, in the scheme as it is now. */
export const palette = () => (isDark() ? DARK : LIGHT);

/** Calls when the scheme changed, the page goes onto paper or comes back, or pixels are others: what is on a canvas is drawn anew. */
export function onScheme(call) {
  const again = () => {
    known = new Map();
    call();
  };
  dark.addEventListener("change", again);
  onPaper(again);
  onPixels(again);
}

/** Calls each time there are more or fewer pixels to a point: the window came to another screen, or was zoomed. */
function onPixels(call) {
  const [least, most] = [devicePixelRatio - 0.001, devicePixelRatio + 0.001]; // no browser says it exactly
  const next = () => {
    onPixels(call);
    call();
  };
  matchMedia(`(min-resolution: ${least}dppx) and (max-resolution: ${most}dppx)`).addEventListener("change", next, { once: true });
}

/** A chart of ECharts, which draws with as many pixels to a point as when it was made; null where there are others now. */
export function sharp(chart) {
  if (chart === null || chart.getDevicePixelRatio() === devicePixelRatio) return chart;
  chart.dispose();
  return null;
}

/** The colour of a share from 0 to 1: viridis, even to the eye and to eyes that tell few colours apart. */
export function viridis(share) {
  const at = Math.min(1, Math.max(0, share)) * (VIRIDIS.length - 1);
  const low = Math.min(VIRIDIS.length - 2, Math.floor(at));
  const part = at - low;
  return VIRIDIS[low].map((value, index) => Math.round(value + part * (VIRIDIS[low + 1][index] - value)));
}

/** Black or white, whichever can be read on a colour. */
export function readable([red, green, blue]) {
  const linear = (value) => (value <= 10 ? value / 3294.6 : ((value / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * linear(red) + 0.7152 * linear(green) + 0.0722 * linear(blue) > 0.18 ? "#000" : "#fff";
}

/** A text as far as there is room for it, in the pen's font. */
export function fitted(pen, text, room) {
  const signs = [...text];
  const said = (count) => (count === signs.length ? text : `${signs.slice(0, count).join("")}…`);
  let [least, most] = [0, signs.length];
  while (least < most) {
    const middle = Math.ceil((least + most) / 2);
    if (pen.measureText(said(middle)).width <= room) least = middle;
    else most = middle - 1;
  }
  return said(least);
}

const LINES = {
  running: [[0, 8, 8, 0]],
  queued: [[4, 4, 4.01, 4]],
  failed: [[0, 0, 8, 8], [0, 8, 8, 0]],
  diverged: [[2, 0, 2, 8], [6, 0, 6, 8]],
  invalid: [[0, 4, 8, 4], [4, 0, 4, 8]],
  cancelled: [[0, 2, 8, 2], [0, 6, 8, 6]],
  early_stopped: [[0, 0, 8, 8]],
  other_protocol: [[0, 6, 8, 6]],
  unmeasured: [[0, 4, 3, 4]],
  missing: [[0, 8, 8, 0]],
};
const ROLES = { early_stopped: "early", invalid: "failed", other_protocol: "front", unmeasured: "quiet", missing: "quiet" };

/** The role of a state's colour. */
function roleOf(state) {
  return ROLES[state] ?? state;
}

/** A tile that fills places of a state, told apart by its lines as by its colour. */
export function tile(state) {
  const canvas = document.createElement("canvas");
  const scale = 2;
  canvas.width = canvas.height = 8 * scale;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.fillStyle = colour(state === "missing" ? "page" : "raised");
  pen.fillRect(0, 0, 8, 8);
  pen.strokeStyle = colour(roleOf(state));
  pen.lineWidth = state === "queued" ? 2.4 : state === "missing" ? 0.7 : 1.6;
  pen.lineCap = state === "queued" ? "round" : "square";
  for (const [x1, y1, x2, y2] of LINES[state] ?? []) {
    pen.beginPath();
    pen.moveTo(x1, y1);
    pen.lineTo(x2, y2);
    pen.stroke();
  }
  return canvas;
}
