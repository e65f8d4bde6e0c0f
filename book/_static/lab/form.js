// The fields of a lab, as Python describes them.
import { element, say } from "./words.js";

const GROUPED = /^\s*[-+]?\d{1,3}(,\d{3})+(\.\d+)?\s*$/; // 1,024: as the results are written

export class Form {
  constructor(id, fields, values, catalogue, changed) {
    Object.assign(this, { id, fields, catalogue });
    this.element = element("form", { class: "naranhi-lab-form", "aria-label": catalogue.texts.settings });
    this.inputs = {};
    this.beginning = Object.fromEntries(fields.map(({ name, default: usual }) => [name, values[name] ?? usual]));
    for (const field of fields) this.add(field, this.beginning[field.name]);
    this.element.addEventListener("submit", (event) => event.preventDefault());
    this.element.addEventListener("input", (event) => {
      this.follow(event.target);
      this.show();
      changed(event.target.name);
    });
    this.show();
  }

  add(field, value) {
    const { catalogue } = this;
    const name = `${this.id}-${field.name}`;
    const label = catalogue.fields[field.name];
    const input = this.input(field, { id: name, name: field.name });
    input.value = value;
    const children = [element("label", { for: name }, label), input];
    if (field.slider) children.push(this.slider(field, label, value));
    const hint = catalogue.hints[field.name] ?? this.hint(field);
    if (hint) {
      input.setAttribute("aria-describedby", `${name}-hint`);
      children.push(element("small", { id: `${name}-hint` }, hint));
    }
    this.inputs[field.name] = input;
    this.element.append(element("div", { class: `naranhi-lab-field ${field.kind}` }, ...children));
  }

  hint(field) {
    if (field.kind === "times") return this.catalogue.hints.times;
    return field.default === "" && ["whole", "number"].includes(field.kind)
      ? this.catalogue.hints.optional : "";
  }

  input(field, attributes) {
    if (field.kind === "choice") {
      const options = field.choices.map((choice) =>
        element("option", { value: choice }, this.catalogue.choices[choice] ?? choice));
      return element("select", attributes, ...options);
    }
    const plain = { ...attributes, spellcheck: "false", autocomplete: "off" };
    if (field.kind === "text") return element("textarea", { ...plain, rows: 5 });
    return element("input", { ...plain, type: "text", inputmode: field.kind === "whole" ? "numeric" : "decimal" });
  }

  slider(field, label, value) {
    const [min, max, step] = field.slider;
    const slider = element("input", {
      type: "range", min, max, step, "data-slider": field.name,
      "aria-label": say(this.catalogue.texts.slider, { label }),
    });
    slider.value = value;
    return slider;
  }

  // A slider and its field say the same.
  follow(changed) {
    const name = changed.dataset.slider ?? changed.name;
    const slider = this.element.querySelector(`[data-slider="${name}"]`);
    if (changed === slider) this.inputs[name].value = slider.value;
    else if (slider) slider.value = this.value(name);
  }

  // What a field says. In times, which are a list, a comma is between two of them.
  value(name) {
    const { value } = this.inputs[name];
    const { kind } = this.fields.find((field) => field.name === name);
    return ["whole", "number"].includes(kind) && GROUPED.test(value) ? value.replaceAll(",", "") : value;
  }

  // A field that does not count with the others as they are is not shown.
  show() {
    for (const field of this.fields) {
      if (!field.only) continue;
      const [other, counted] = field.only;
      const chosen = [this.inputs[other].value];
      if (other === "schedule" && this.inputs.compare) chosen.push(this.inputs.compare.value);
      const counts = field.name === "own" ? counted.includes(chosen[0])
        : chosen.some((choice) => counted.includes(choice));
      this.inputs[field.name].parentElement.hidden = !counts;
    }
  }

  // What counts: a field that is not shown is as it is by default.
  get values() {
    const shown = Object.entries(this.inputs).filter(([, input]) => !input.parentElement.hidden);
    return Object.fromEntries(shown.map(([name]) => [name, this.value(name)]));
  }

  // Mark the fields that a message is about, and no others.
  mark(names, message) {
    for (const [name, input] of Object.entries(this.inputs)) {
      const wrong = names.includes(name);
      input.setAttribute("aria-invalid", wrong);
      if (wrong) input.setAttribute("aria-errormessage", message);
      else input.removeAttribute("aria-errormessage");
    }
  }

  set(values) {
    for (const [name, value] of Object.entries(values)) {
      if (!Object.hasOwn(this.inputs, name)) continue;
      this.inputs[name].value = value;
      this.follow(this.inputs[name]);
    }
    this.show();
  }

  // As at the beginning, but for these values. What then is not shown is kept: it may be long work.
  begin(values) {
    const before = Object.entries(this.inputs).map(([name, input]) => [name, input.value]);
    this.set({ ...this.beginning, ...values });
    const hidden = before.filter(([name]) => this.inputs[name].parentElement.hidden);
    this.set(Object.fromEntries(hidden));
  }

  // What differs from the beginning, which a page may have set otherwise than usual, for a link.
  get changed() {
    return Object.entries(this.values).filter(([name, value]) => value !== this.beginning[name]);
  }
}
