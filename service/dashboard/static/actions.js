// Buttons with data-action: each sends a POST to the API and says what came of it. The focus stays where it was.
import { send, showProblem } from "/static/request.js";

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-action]");
  if (button === null || button.getAttribute("aria-disabled") === "true") return;
  const { action, confirm: question } = button.dataset;
  const problem = document.getElementById("action-result");
  const said = document.getElementById("action-said");
  if (question && !window.confirm(question)) return;
  button.setAttribute("aria-disabled", "true"); // a button that is disabled loses the focus
  const result = await send("POST", action);
  button.removeAttribute("aria-disabled");
  problem.hidden = result.ok;
  said.hidden = !result.ok;
  if (result.ok) {
    said.textContent = `Done: ${button.textContent.trim().toLowerCase()}.`;
    document.dispatchEvent(new CustomEvent("acted"));
  } else {
    showProblem(problem, result);
  }
});
