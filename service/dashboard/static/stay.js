// Tables wider than their room: the columns that say what a row is stay in sight, and where more is, the edge fades. On
// paper they stand in parts below each other, each with these columns.
import { onPaper } from "/static/paper.js";

const MOST = 0.45; // of the room there is: the numbers are to be seen, too
const [WHOLE, PART] = [18, 14]; // columns of a table that is printed whole, and of each part of a wider one

/** How many columns say what a row is: the first or, of a leaderboard, its place and the fields of its configuration. */
function standing(table) {
  return table.dataset.fields ? 1 + table.dataset.fields.split(",").length : 1;
}

function settle(table) {
  const room = table.closest(".wide");
  for (const cell of table.querySelectorAll(".stay")) {
    cell.classList.remove("stay");
    cell.style.removeProperty("left");
  }
  room.classList.toggle("cut", room.scrollWidth > room.clientWidth);
  fade(room);
  if (!room.classList.contains("cut") || table.tHead === null) return;
  const lefts = [];
  let left = 0;
  for (const heading of [...table.tHead.rows[0].cells].slice(0, standing(table))) {
    if (left + heading.offsetWidth > MOST * room.clientWidth) break;
    lefts.push(left);
    left += heading.offsetWidth;
  }
  room.style.scrollPaddingLeft = `${left}px`; // what has the focus does not stand under them
  for (const row of table.rows) {
    lefts.forEach((place, index) => {
      row.cells[index]?.classList.add("stay");
      row.cells[index]?.style.setProperty("left", `${place}px`);
    });
  }
}

/** Says on which sides of its room a table goes on. */
function fade(room) {
  const rest = room.scrollWidth - room.clientWidth - room.scrollLeft;
  room.classList.toggle("before", room.scrollLeft > 1);
  room.classList.toggle("beyond", rest > 1);
}

const watched = new ResizeObserver((entries) => {
  for (const room of new Set(entries.map(({ target }) => target.closest(".wide")))) {
    const table = room.querySelector("table");
    if (table !== null && room.clientWidth > 0) settle(table);
  }
});

const rooms = document.getElementsByClassName("wide");
const known = new WeakSet();

function watch(room) {
  const table = room.querySelector(":scope > table");
  if (table === null || known.has(room)) return;
  known.add(room);
  watched.observe(room);
  watched.observe(table);
  room.addEventListener("scroll", () => fade(room), { passive: true });
}

for (const room of rooms) watch(room);
// Rows that come later stand in the same columns, and tables that come later stay in sight as those before did.
new MutationObserver((records) => {
  for (const room of rooms) watch(room);
  for (const room of new Set(records.map(({ target }) => target.closest(".wide")))) if (known.has(room)) settle(room.querySelector("table"));
}).observe(document.getElementById("main"), { childList: true, subtree: true });

/** Puts a table that has more columns than a sheet below itself in parts, which stand in its place. */
function part(table) {
  const all = table.tHead?.rows[0].cells.length ?? 0;
  if (all <= WHOLE) return;
  const first = Math.min(standing(table), PART / 2);
  const count = Math.ceil((all - first) / (PART - first));
  const each = Math.ceil((all - first) / count);
  const parts = Array.from({ length: count }, (_, index) => {
    const made = table.cloneNode(true);
    made.classList.add("part");
    const from = first + index * each;
    for (const row of made.rows) {
      [...row.cells].forEach((cell, at) => at >= first && (at < from || at >= from + each) && cell.remove());
    }
    return made;
  });
  table.after(...parts);
}

onPaper((on) => {
  if (on) document.querySelectorAll(".wide > table").forEach(part);
  else for (const made of document.querySelectorAll(".wide > .part")) made.remove();
});
