// Requests to the API, with what it says when it refuses.

/** Sends a request; resolves to {ok, status, answer}, whatever comes back. */
export async function send(method, url, { body = undefined, type = "application/json", headers = {}, signal = undefined } = {}) {
  const given = { Accept: "application/json", ...headers };
  if (body !== undefined) given["Content-Type"] = type;
  try {
    const response = await fetch(url, { method, body, headers: given, credentials: "same-origin", signal });
    const text = await response.text();
    let answer = null;
    try {
      answer = JSON.parse(text);
    } catch {
      answer = { detail: text.slice(0, 500) };
    }
    return { ok: response.ok, status: response.status, answer };
  } catch {
    return { ok: false, status: 0, answer: { detail: "The service does not answer. Does it run?" } };
  }
}

/** A key that makes one thing of a request however often it is sent. (Plain http has no crypto.randomUUID.) */
export function newKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Whether an answer says nothing of what was asked, as none does: it is worth another try. */
export function isAway(answer) {
  return !answer || answer.status === 0 || answer.status === 429 || answer.status > 500;
}

/** Milliseconds to the next try after so many answers in a row that did not come: ever more, a minute at most. */
export const patience = (missed) => Math.min(60_000, 1000 * 2 ** missed);

/** An element with a text and children: names of others are texts here, never HTML. */
export function element(name, text = "", children = [], attributes = {}) {
  const made = document.createElement(name);
  if (text !== "") made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Shows a problem document: its detail, and every field that is wrong where the detail does not say it all. */
export function showProblem(place, { status, answer }) {
  const detail = answer && answer.detail ? String(answer.detail) : "unknown error";
  const fields = (answer && answer.errors) || [];
  const title = { 0: "No answer", 401: "Signed out" }[status] ?? `Refused (${status})`;
  place.replaceChildren(element("strong", title), ...(status === 401 ? [] : [element("p", detail)]));
  if (fields.length > 1) {
    const items = fields.map((one) => element("li", "", [element("code", one.field), `: ${one.message}`]));
    place.append(element("ul", "", items));
  }
  if (status === 401) {
    const attributes = { href: "/login", target: "_blank", rel: "noopener" };
    place.append(element("p", "", [element("a", "Sign in", [], attributes), " in another tab: what is written here stays."]));
  }
  place.hidden = false;
}
