// A puzzle: the book's judge says whether a schedule passes, and in its own words why not.
import { Beside } from "./schedule.js";
import { element } from "./words.js";

export function make(lab, body) {
  const { texts } = lab.catalogue;
  const verdict = element("div", { "aria-live": "polite" });
  const beside = new Beside(lab.catalogue);
  body.append(element("p", {}, texts.puzzle), verdict, beside.element);
  return {
    show(answer) {
      const lead = answer.passes ? texts.passes : texts.fails;
      const faults = answer.faults.map((fault) => element("li", {}, element("code", { lang: "en" }, fault)));
      const said = element("p", { class: answer.passes ? "naranhi-lab-passes" : "naranhi-lab-error" },
        element("data", { "data-output": "passes", "data-value": String(answer.passes) }, lead));
      verdict.replaceChildren(said, ...(faults.length ? [element("ul", {}, ...faults)] : []));
      beside.element.hidden = !answer.timelines.length;
      if (answer.timelines.length) beside.show(answer.timelines);
    },
  };
}
