// Check boxes of lists that lead to comparisons and curves: a bar counts what is chosen, and says what is too much.
import { element } from "/static/request.js";

const [FEWEST, MOST] = [2, 10];

const boxes = (form) => [...form.querySelectorAll("input[type=checkbox][data-choose]")];

/** Counts, and says whether so many can be compared. */
function show(form) {
  const bar = form.querySelector(".chosen");
  const chosen = boxes(form).filter((box) => box.checked).length;
  const right = chosen >= FEWEST && chosen <= MOST;
  const fix = chosen < FEWEST ? `check ${FEWEST} to ${MOST} to compare them` : `at most ${MOST} are compared`;
  bar.classList.toggle("some", chosen > 0);
  bar.querySelector(".clear").hidden = chosen === 0;
  bar.querySelector(".compare").setAttribute("aria-disabled", String(!right));
  const said = `${chosen} chosen${right ? "" : `: ${fix}`}`;
  if (bar.querySelector(".count").textContent !== said) bar.querySelector(".count").textContent = said;
}

function setUp(form) {
  const bar = form.querySelector(".chosen");
  const clear = element("button", "None", [], { type: "button", class: "clear" });
  bar.prepend(element("span", "", [], { class: "count", role: "status" }));
  bar.append(clear);
  form.dataset.counted = "";
  form.addEventListener("change", () => show(form));
  form.addEventListener("submit", (event) => {
    if (event.submitter?.getAttribute("aria-disabled") === "true") event.preventDefault();
  });
  clear.addEventListener("click", () => {
    for (const box of boxes(form)) box.checked = false;
    show(form);
    boxes(form)[0]?.focus();
  });
  show(form);
}

function every() {
  for (const form of document.querySelectorAll("form.choosing")) {
    if (form.dataset.counted === undefined) setUp(form);
    else show(form); // the rows were read anew
  }
}

every();
addEventListener("pageshow", every); // boxes that a browser kept checked while another page was open
document.addEventListener("refreshed", every);
