// The form of a spec: widgets that the server made of its schema, filled from a document, read as edits of it.
// A trial's field has a value (in base), several (chips: an axis of grid), or none.
import { element } from "/static/request.js";

const NUMBER = /^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?$/i;
const same = (one, other) => JSON.stringify(one) === JSON.stringify(other);
const said = (value) => (typeof value === "string" ? value : JSON.stringify(value));

/** What stands at a path; undefined where nothing does. Throws where something other than an object is in the way. */
function inside(document, path) {
  let found = document;
  for (const name of path) {
    if (found === undefined || found === null) return undefined;
    if (typeof found !== "object" || Array.isArray(found)) throw new TypeError("no object");
    found = Object.hasOwn(found, name) ? found[name] : undefined;
  }
  return found;
}

class Field {
  constructor(root, changed) {
    this.root = root;
    this.changed = changed;
    this.path = root.dataset.path;
    this.kind = root.dataset.kind;
    this.varies = root.dataset.varies !== undefined;
    this.control = root.querySelector("select, input:not([type=checkbox]), textarea");
    this.list = root.querySelector(".chips");
    this.picks = root.querySelector(".picks");
    this.vary = root.querySelector(".vary");
    this.about = this.control.getAttribute("aria-describedby");
    this.name = root.querySelector("label").firstChild.textContent.trim();
    this.chips = [];
    this.dirty = false;
    this.listen();
  }

  /** {value}, {axis: [...]} or {}: what the form says of it. */
  state() {
    if (this.vary?.getAttribute("aria-pressed") === "true") return this.chips.length > 0 ? { axis: [...this.chips] } : {};
    const pending = this.pending();
    if (this.kind === "words") {
      const all = pending === undefined ? this.chips : [...this.chips, pending];
      return all.length > 0 ? { value: [...all] } : {};
    }
    if (this.chips.length > 0) return { axis: pending === undefined ? [...this.chips] : [...this.chips, pending] };
    return pending === undefined ? {} : { value: pending };
  }

  /** The value that is being written; undefined where there is none. */
  pending() {
    const text = this.kind === "long" ? this.control.value : this.control.value.trim();
    if (text === "") return undefined;
    if (this.kind === "choice") return JSON.parse(text);
    if (this.root.dataset.nullable !== undefined && text === "null") return null;
    if (this.kind === "number") return NUMBER.test(text) && Number.isFinite(Number(text)) ? Number(text) : text;
    if (this.kind === "list") {
      for (const json of text.startsWith("[") ? [text] : [`[${text}]`]) {
        try {
          return JSON.parse(json);
        } catch {
          return text;
        }
      }
    }
    return text;
  }

  write(state) {
    this.chips = [];
    this.control.value = "";
    const axis = state.axis ?? (this.kind === "words" && Array.isArray(state.value) ? state.value : undefined);
    if (this.kind === "choice") {
      this.several(axis !== undefined);
      if (axis !== undefined) this.chips = [...axis];
      else if (state.value !== undefined) this.choose(state.value);
      this.tick();
    } else if (axis !== undefined) {
      this.chips = [...axis];
    } else if (state.value !== undefined) {
      this.control.value = said(state.value);
    }
    this.draw();
  }

  choose(value) {
    const json = JSON.stringify(value);
    if (![...this.control.options].some((option) => option.value === json)) {
      this.control.append(element("option", said(value), [], { value: json }));
    }
    this.control.value = json;
  }

  /** Whether several values of a choice are picked. */
  several(on) {
    if (!this.vary) return;
    this.vary.setAttribute("aria-pressed", String(on));
    this.picks.hidden = !on;
    this.control.hidden = on;
  }

  tick() {
    if (!this.picks) return;
    for (const value of this.chips) {
      const json = JSON.stringify(value);
      if ([...this.picks.querySelectorAll("input")].some((box) => box.value === json)) continue;
      const box = element("input", "", [], { type: "checkbox", value: json });
      this.picks.append(element("label", "", [box, ` ${said(value)}`]));
    }
    for (const box of this.picks.querySelectorAll("input")) {
      box.checked = this.chips.some((value) => JSON.stringify(value) === box.value);
    }
  }

  /** Makes the chips those of the values. What is there stays: a click on it may have begun already. */
  draw() {
    if (!this.list) return;
    this.list.hidden = this.chips.length === 0;
    this.chips.forEach((value, index) => {
      const label = `remove ${said(value)} from ${this.path}`;
      const there = this.list.children[index];
      if (there?.firstChild.getAttribute("aria-label") === label) return;
      const cross = element("span", "×", [], { "aria-hidden": "true" });
      const button = element("button", "", [said(value), " ", cross], { type: "button", class: "chip", "aria-label": label });
      const chip = element("li", "", [button]);
      button.addEventListener("click", () => this.remove([...this.list.children].indexOf(chip)));
      if (there) there.replaceWith(chip);
      else this.list.append(chip);
    });
    while (this.list.children.length > this.chips.length) this.list.lastChild.remove();
  }

  remove(index) {
    this.chips.splice(index, 1);
    this.draw();
    const left = this.list.querySelectorAll("button");
    (left[Math.min(index, left.length - 1)] ?? this.control).focus();
    this.edit();
  }

  edit() {
    this.dirty = true;
    this.changed(this);
  }

  /** Makes chips of texts: of what is being written, or of the parts of a list that was pasted. */
  keep(texts = [this.control.value]) {
    const known = new Set(this.chips.map((one) => JSON.stringify(one)));
    for (const text of texts) {
      this.control.value = text;
      const value = this.pending();
      if (value === undefined || known.has(JSON.stringify(value))) continue;
      known.add(JSON.stringify(value));
      this.chips.push(value);
    }
    this.control.value = "";
    this.draw();
  }

  listen() {
    const many = this.list !== null && (this.varies || this.kind === "words");
    this.control.addEventListener("input", () => {
      if (many && this.kind !== "list" && this.control.value.includes(",")) {
        const parts = this.control.value.split(",");
        const last = parts.pop();
        this.keep(parts);
        this.control.value = last;
      }
      if (many && this.control.value.startsWith(" ")) this.control.value = this.control.value.trimStart();
      this.edit();
    });
    this.control.addEventListener("keydown", (event) => {
      if (event.isComposing || !many) return;
      if (event.key === "Enter" && (this.chips.length > 0 || this.kind === "list" || this.kind === "words")) {
        this.keep();
        this.edit();
      } else if (event.key === "Backspace" && this.control.value === "" && this.chips.length > 0) {
        event.preventDefault();
        this.control.value = said(this.chips.pop());
        this.draw();
        this.edit();
      }
    });
    this.control.addEventListener("change", () => {
      if (many && this.chips.length > 0 && this.pending() !== undefined) this.keep();
    });
    this.vary?.addEventListener("click", () => {
      const on = this.vary.getAttribute("aria-pressed") !== "true";
      const state = this.state();
      if (on) {
        const first = this.control.options[0].textContent.replace(/ \(default\)$/, "");
        const named = [...this.control.options].find((option) => option.value && option.textContent === first);
        this.chips = [state.value !== undefined ? state.value : JSON.parse(named.value)];
        this.control.value = "";
      } else {
        const [value] = this.chips;
        this.chips = [];
        if (value !== undefined) this.choose(value);
      }
      this.several(on);
      this.tick();
      this.edit();
    });
    this.picks?.addEventListener("change", (event) => {
      const value = JSON.parse(event.target.value);
      this.chips = this.chips.filter((one) => !same(one, value));
      if (event.target.checked) this.chips.push(value);
      this.edit();
    });
  }

  /** What a document says of it; {odd} is something that the form cannot show. */
  of(document) {
    try {
      if (!this.varies) {
        const value = inside(document, this.path.split("."));
        if (value === undefined) return {};
        const odd = value !== null && typeof value === "object" && this.kind !== "words";
        return odd || (this.kind === "words" && !Array.isArray(value)) ? { odd: true } : { value };
      }
      const axis = inside(document, ["grid", this.path]);
      const value = inside(document, ["base", ...this.path.split(".")]);
      if (axis !== undefined) return Array.isArray(axis) && axis.length > 0 ? { axis } : { odd: true };
      return value === undefined ? {} : { value };
    } catch {
      return { odd: true };
    }
  }

  fill(document) {
    const state = this.of(document);
    this.root.classList.toggle("odd", state.odd === true);
    this.root.inert = state.odd === true;
    if (!same(state, this.state())) this.write(state.odd ? {} : state);
  }

  /** The edits of a document that make it say what the form says. */
  edits() {
    const { axis, value } = this.state();
    const put = (path, what) => (what === undefined ? { path, remove: true } : { path, value: what });
    if (this.path === "scheduler.type") return [put(["scheduler"], value === undefined ? undefined : { type: value })];
    if (!this.varies) return [put(this.path.split("."), value)];
    const edits = [put(["base", ...this.path.split(".")], value), put(["grid", this.path], axis)];
    return edits.sort((one, other) => Number(other.remove ?? false) - Number(one.remove ?? false));
  }

  /** Shows what is wrong with it: a message, and of an axis which of the values. */
  blame(messages, places) {
    this.root.querySelector(".wrong")?.remove();
    const wrong = messages.length > 0;
    const inputs = this.picks ? [this.control, this.picks] : [this.control];
    for (const input of inputs) {
      if (wrong) input.setAttribute("aria-invalid", "true");
      else input.removeAttribute("aria-invalid");
      if (wrong) input.setAttribute("aria-describedby", `wrong-${this.path} ${this.about}`);
      else if (input === this.control) input.setAttribute("aria-describedby", this.about);
      else input.removeAttribute("aria-describedby");
    }
    this.list?.querySelectorAll("button").forEach((chip, index) => chip.classList.toggle("bad", places.has(index)));
    if (!wrong) return;
    const text = element("p", messages.join("; "), [], { class: "wrong", id: `wrong-${this.path}` });
    this.root.querySelector(".about").before(text);
  }
}

export class SpecForm {
  /** `changed` is called at once for every change that a person makes. */
  constructor(root, changed) {
    this.root = root;
    this.fields = new Map();
    for (const one of root.querySelectorAll(".field")) {
      const field = new Field(one, () => {
        this.relate();
        changed();
      });
      this.fields.set(field.path, field);
    }
  }

  /** Whether it says what the document does not say yet. */
  get dirty() {
    return [...this.fields.values()].some((field) => field.dirty);
  }

  /** The edits since the last time. */
  take() {
    this.taken = [...this.fields.values()].filter((field) => field.dirty);
    for (const field of this.taken) field.dirty = false;
    return this.taken.flatMap((field) => field.edits());
  }

  /** The edits that were taken last came nowhere. */
  putBack() {
    for (const field of this.taken) field.dirty = true;
  }

  fill(document) {
    for (const field of this.fields.values()) if (!field.dirty) field.fill(document);
    this.relate();
  }

  /** What depends on several fields: those of a scheduler that is not chosen, and how many of a group are set. */
  relate() {
    const scheduler = this.fields.get("scheduler.type")?.state().value;
    for (const field of this.fields.values()) {
      const { when } = field.root.dataset;
      if (when !== undefined) field.root.hidden = scheduler !== when;
    }
    for (const group of this.root.querySelectorAll(".group")) {
      const fields = [...group.querySelectorAll(".field")].map((one) => this.fields.get(one.dataset.path));
      const set = fields.filter((field) => Object.keys(field.state()).length > 0).length;
      const wrong = group.querySelectorAll(".wrong").length;
      const words = [set > 0 ? `${set} set` : "", wrong > 0 ? `${wrong} wrong` : ""].filter(Boolean);
      group.querySelector("[data-set]").textContent = words.join(", ");
    }
  }

  /** Shows errors at their fields. Resolves each to its field's path, or null where the form has none. */
  blame(errors) {
    const messages = new Map();
    const places = new Map();
    const found = errors.map(({ field, message }) => {
      const [, path, ends] = /^(?:base\.|grid\.)?(.*?)((?:\[\d+\])*)$/s.exec(field);
      if (!this.fields.has(path) || this.fields.get(path).root.hidden) return null;
      messages.set(path, [...(messages.get(path) ?? []), message]);
      const place = /^\[(\d+)\]/.exec(ends);
      if (place) places.set(path, (places.get(path) ?? new Set()).add(Number(place[1])));
      return path;
    });
    for (const [path, field] of this.fields) field.blame(messages.get(path) ?? [], places.get(path) ?? new Set());
    this.relate();
    return found;
  }

  /** Moves the focus to a field. */
  show(path) {
    const { root, control, picks } = this.fields.get(path);
    root.closest("details").open = true;
    (control.hidden ? picks.querySelector("input") : control).focus();
  }
}
