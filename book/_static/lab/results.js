// Results beside their formulas, and the tables of the same numbers.
import { element, number, say, table, written } from "./words.js";

const value = (one) => (Array.isArray(one) ? Math.max(...one) : one);
const exact = (one) => (typeof one === "string" ? one : JSON.stringify(one));

// One result: what it is, its value, and how it comes about.
export function result(name, output, catalogue, { prefix = "" } = {}) {
  const { texts } = catalogue;
  const shown = element("data", { "data-output": prefix + name, "data-value": exact(output.value) },
    written(value(output.value), output.unit));
  const notes = [];
  if (Array.isArray(output.value)) {
    notes.push(say(texts.by_rank, { values: output.value.map((one) => number(one)).join(", ") }));
  }
  if (output.formula) {
    const values = { formula: output.formula, numbers: output.put_in };
    notes.push(say(texts.formula, { ...values, value: written(output.computed, output.unit) }));
  }
  if (output.closed) {
    const { formula, put_in: numbers, value: computed } = output.closed;
    notes.push(say(texts.closed, { formula, numbers, value: written(computed, output.unit) }));
  } else if (name === "bubble_rate" && output.formula) notes.push(texts.no_closed);
  if (output.sum) {
    const parts = Object.entries(output.sum).map(([part, one]) => `${part} ${written(one, output.unit)}`);
    notes.push(`${parts.join(" + ")} = ${written(output.value, output.unit)}`);
  }
  return element("div", { class: "naranhi-lab-result" },
    element("dt", {}, catalogue.outputs[name]),
    element("dd", {}, shown, ...notes.map((note) => element("small", {}, note))));
}

export const results = (outputs, catalogue, options) =>
  element("dl", { class: "naranhi-lab-results" },
    ...Object.entries(outputs).map(([name, output]) => result(name, output, catalogue, options)));

export function answered({ columns, rows }, catalogue) {
  const heads = columns.map(([name]) => catalogue.columns[name] ?? name);
  const cells = rows.map((row) => row.map((cell, i) =>
    (typeof cell === "string" ? catalogue.words[cell] ?? cell : written(cell, columns[i][1]))));
  return table(heads, cells);
}

// A table that is made when a reader opens it.
export function folded(title, make) {
  const fold = element("details", {}, element("summary", {}, title));
  fold.addEventListener("toggle", () => {
    if (fold.open && fold.children.length === 1) fold.append(make());
  });
  return fold;
}

export function actions(line, unit, catalogue) {
  const heads = ["rank", "action", "start", "end"].map((name) => catalogue.columns[name]);
  const zero = Math.min(...line.rows.map((row) => row[0][3]));
  const rows = line.rows.flatMap((row, rank) => row.map(([name, , , start, end]) =>
    [String(rank), name, written(start - zero, unit), written(end - zero, unit)]));
  return table(heads, rows);
}
