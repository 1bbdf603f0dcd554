// The columns that say which configuration a row is stay in sight while a wide leaderboard is scrolled sideways.

const MOST = 0.45; // of the room there is: the numbers are to be seen, too

function settle(table) {
  const room = table.closest(".wide");
  for (const cell of table.querySelectorAll(".stay")) {
    cell.classList.remove("stay");
    cell.style.removeProperty("left");
  }
  if (room.scrollWidth <= room.clientWidth) return;
  const count = table.dataset.fields === "" ? 1 : 1 + table.dataset.fields.split(",").length;
  const lefts = [];
  let left = 0;
  for (const heading of [...table.tHead.rows[0].cells].slice(0, count)) {
    if (left + heading.offsetWidth > MOST * room.clientWidth) break;
    lefts.push(left);
    left += heading.offsetWidth;
  }
  for (const row of table.rows) {
    lefts.forEach((place, index) => {
      row.cells[index].classList.add("stay");
      row.cells[index].style.left = `${place}px`;
    });
  }
}

const tables = [...document.querySelectorAll("table[data-fields]")];
const all = () => tables.forEach(settle);
new ResizeObserver(all).observe(document.getElementById("main"));
for (const table of tables) new MutationObserver(() => settle(table)).observe(table.tBodies[0], { childList: true });
