// Open a lab: start Python, build its fields, and ask again whenever one of them changes.
import { Form } from "./form.js";
import * as python from "./python.js";
import { complaint, element } from "./words.js";

const VIEWS = {
  schedule: () => import("./schedule.js"),
  puzzle: () => import("./puzzle.js"),
};
const SLOW = 400; // milliseconds, after which a reader is told that the lab computes
let catalogues;

function load(root) {
  if (!catalogues) {
    const href = new URL("lab.css", import.meta.url);
    document.head.append(element("link", { rel: "stylesheet", href }));
  }
  const address = new URL(root.dataset.catalogue, import.meta.url);
  catalogues ??= fetch(address).then((response) => {
    if (!response.ok) throw new Error(`${response.status} ${address}`);
    return response.json();
  }).catch((error) => {
    catalogues = undefined;
    throw error;
  });
  return catalogues;
}

// The settings that an address has for a lab, #lab-schedule&stages=4, or undefined.
function settings(root, address) {
  const [name, ...pairs] = new URL(address).hash.slice(1).split("&");
  if (name !== root.id || !pairs.length) return undefined;
  return Object.fromEntries(new URLSearchParams(pairs.join("&")));
}

// Asks one question at a time, and of those that come meanwhile only the last of each kind: what
// the fields say, and what a file has.
class Lab {
  constructor(root, catalogue) {
    Object.assign(this, { root, catalogue, kind: root.dataset.lab, busy: false, shown: false });
    this.questions = new Map();
    this.errors = new Map();
    const id = `${root.id}-message`;
    this.message = element("div", { id, class: "naranhi-lab-message", "aria-live": "polite" });
    this.told = element("p", { class: "naranhi-lab-told", role: "status" });
  }

  ask(kind, values, show) {
    this.root.dataset.state = "loading";
    this.told.textContent = "";
    if (kind === this.kind) this.errors.clear(); // who changes a field has read them
    this.questions.set(kind, { values, show });
    if (!this.busy) this.work();
  }

  async work() {
    this.busy = true;
    const { computing } = this.catalogue.texts;
    while (this.questions.size) {
      const [[kind, { values, show }]] = this.questions;
      this.questions.delete(kind);
      const slow = setTimeout(() => this.message.replaceChildren(computing), SLOW);
      let error;
      try {
        const answer = await python.ask(this.catalogue, kind, values);
        error = answer.error;
        if (!error && !this.questions.has(kind)) show(answer);
      } catch (failure) {
        error = { code: "internal", values: { why: failure.words ?? failure.message } };
      }
      clearTimeout(slow);
      if (!this.questions.has(kind)) this.end(kind, error);
    }
    this.busy = false;
    this.settle();
  }

  end(kind, error) {
    if (error) this.errors.set(kind, error);
    else this.errors.delete(kind);
    if (error || kind !== this.kind) return;
    // Who does not see the figures is told that there are others, but for the first ones.
    if (this.shown) this.told.textContent = this.catalogue.texts.updated;
    this.shown = true;
  }

  // Say what is wrong without asking.
  fail(kind, error) {
    this.end(kind, error);
    this.settle();
  }

  settle() {
    const errors = [...this.errors.values()];
    const said = errors.map((error) => {
      const { lead, text } = complaint(error, this.catalogue);
      const own = text === undefined ? [] : [element("code", { lang: "en" }, text)];
      return element("p", { class: "naranhi-lab-error" }, lead, " ", ...own);
    });
    if (this.shown && this.errors.has(this.kind)) {
      said.push(element("p", {}, this.catalogue.texts.before));
    }
    this.message.replaceChildren(...said);
    this.wrong?.(errors.map(({ values }) => values?.name), this.message.id);
    if (!this.busy) this.root.dataset.state = errors.length ? "error" : "ready";
  }
}

export async function open(root) {
  const catalogue = await load(root);
  root.querySelector(".naranhi-lab-failed")?.remove();
  await python.start(catalogue);
  const view = await (VIEWS[root.dataset.lab] ?? (() => import("./calculator.js")))();
  const fields = await python.fields(catalogue, root.dataset.lab);
  const lab = new Lab(root, catalogue);
  const body = element("div", { class: "naranhi-lab-live" });
  const link = element("a", { class: "naranhi-lab-link" }, catalogue.texts.link);
  const shown = view.make(lab, body);
  const asked = (name) => {
    shown.changed?.(form, name); // which may fill a field
    link.href = `#${root.id}&${new URLSearchParams(form.changed)}`;
    lab.ask(lab.kind, form.values, (answer) => shown.show(answer, form));
  };
  const form = new Form(root.id, fields, JSON.parse(root.dataset.values), catalogue, asked);
  form.set(settings(root, location) ?? {});
  lab.wrong = (names, message) => form.mark(names, message);
  addEventListener("hashchange", ({ oldURL, newURL }) => {
    // Back from the settings of a link to no place of the page is back to the beginning.
    const back = !new URL(newURL).hash && settings(root, oldURL) && {};
    const found = settings(root, newURL) ?? back;
    if (!found) return;
    form.begin(found);
    asked();
  });
  // Who has gone on to something else meanwhile stays there.
  const here = [document.body, null].includes(document.activeElement)
    || root.contains(document.activeElement);
  root.querySelector(".naranhi-lab-start").remove();
  root.querySelector(".naranhi-lab-picture").classList.add("naranhi-lab-paper");
  const proof = root.querySelector(".naranhi-lab-proof");
  const parts = [form.element, lab.message, lab.told, body, element("p", {}, link)];
  if (proof) proof.before(...parts);
  else root.append(...parts);
  shown.opened?.(form);
  asked();
  if (here) form.element.querySelector("select, input, textarea").focus({ preventScroll: true });
}
