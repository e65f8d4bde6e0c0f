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

function inLink(root) {
  const [name, ...pairs] = location.hash.slice(1).split("&");
  return name === root.id ? Object.fromEntries(new URLSearchParams(pairs.join("&"))) : {};
}

// Asks one question at a time, and of those that come meanwhile only the last.
class Lab {
  constructor(root, catalogue) {
    Object.assign(this, { root, catalogue, kind: root.dataset.lab, busy: false, next: undefined });
    this.message = element("div", { class: "naranhi-lab-message", "aria-live": "polite" });
  }

  ask(kind, values, show) {
    this.root.dataset.state = "loading";
    this.next = { kind, values, show };
    if (!this.busy) this.work();
  }

  async work() {
    this.busy = true;
    while (this.next) {
      const { kind, values, show } = this.next;
      this.next = undefined;
      const slow = setTimeout(() => this.message.replaceChildren(this.catalogue.texts.computing), SLOW);
      let answer;
      try {
        answer = await python.ask(kind, values);
      } catch (error) {
        answer = { error: { code: "internal", values: { why: error.message } } };
      }
      clearTimeout(slow);
      if (!this.next) this.take(answer, show);
    }
    this.busy = false;
  }

  take(answer, show) {
    if (answer.error) this.complain(answer.error);
    else {
      this.message.replaceChildren();
      show(answer);
    }
    this.root.dataset.state = answer.error ? "error" : "ready";
  }

  complain(error) {
    const { lead, text } = complaint(error, this.catalogue);
    const own = text === undefined ? [] : [element("code", { lang: "en" }, text)];
    this.message.replaceChildren(element("p", { class: "naranhi-lab-error" }, lead, " ", ...own));
  }
}

export async function open(root) {
  const catalogue = await load(root);
  root.querySelector(".naranhi-lab-failed")?.remove();
  await python.start(catalogue);
  const view = await (VIEWS[root.dataset.lab] ?? (() => import("./calculator.js")))();
  const fields = await python.fields(root.dataset.lab);
  const lab = new Lab(root, catalogue);
  const body = element("div", { class: "naranhi-lab-live" });
  const link = element("a", { class: "naranhi-lab-link" }, catalogue.texts.link);
  const shown = view.make(lab, body);
  const asked = (name) => {
    link.href = `#${root.id}&${new URLSearchParams(form.changed)}`;
    shown.changed?.(form, name);
    lab.ask(lab.kind, form.values, (answer) => shown.show(answer, form));
  };
  const form = new Form(root.id, fields, JSON.parse(root.dataset.values), catalogue, asked);
  form.set(inLink(root));
  addEventListener("hashchange", () => {
    const found = inLink(root);
    if (!Object.keys(found).length) return;
    form.set({ ...form.beginning, ...found });
    asked();
  });
  root.querySelector(".naranhi-lab-start").remove();
  root.querySelector(".naranhi-lab-picture").classList.add("naranhi-lab-paper");
  const proof = root.querySelector(".naranhi-lab-proof");
  const parts = [form.element, lab.message, body, element("p", {}, link)];
  if (proof) proof.before(...parts);
  else root.append(...parts);
  shown.opened?.(form);
  asked();
  form.element.querySelector("select, input, textarea").focus({ preventScroll: true });
}
