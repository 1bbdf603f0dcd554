// Buttons with data-action: each sends a POST to the API and says what came of it.
import { send, showProblem } from "/static/request.js";

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button[data-action]");
  if (button === null) return;
  const { action, confirm: question } = button.dataset;
  const said = document.getElementById("action-result");
  if (question && !window.confirm(question)) return;
  button.disabled = true;
  const result = await send("POST", action);
  if (result.ok) {
    location.reload(); // whole, as another stream may begin or end with it
    return;
  }
  showProblem(said, result);
  button.disabled = false;
});
