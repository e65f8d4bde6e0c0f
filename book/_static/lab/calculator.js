// A calculator: results beside their formulas, a table, and what the package says in words.
import { answered, folded, results } from "./results.js";
import { element } from "./words.js";

export function make(lab, body) {
  const { texts } = lab.catalogue;
  const said = (text) => element("pre", { lang: "en", tabindex: "0" }, text);
  return {
    show(answer) {
      const parts = [results(answer.outputs, lab.catalogue)];
      if (answer.table) parts.push(answered(answer.table, lab.catalogue));
      if (answer.text) parts.push(folded(texts.why, () => said(answer.text)));
      for (const [name, text] of Object.entries(answer.commands ?? {})) {
        parts.push(folded(`${texts.commands}: ${name}`, () => said(text)));
      }
      if (!answer.table && answer.text) parts.at(-1).open = true;
      body.replaceChildren(...parts);
    },
  };
}
