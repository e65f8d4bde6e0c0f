// A file of the reader's own, beside its simulation. It is read here and goes nowhere.
import { folded, results } from "./results.js";
import { Beside } from "./schedule.js";
import { element, say, table, written } from "./words.js";

const MOST = 20e6; // bytes

export function make(lab, form) {
  const { catalogue } = lab;
  const name = `${lab.root.id}-file`;
  const input = element("input", { type: "file", id: name, accept: ".json,.csv,text/csv,application/json", "data-file": true });
  const shown = element("div", { class: "naranhi-lab-dropped" });
  const place = element("div", { class: "naranhi-lab-drop" },
    element("label", { for: name }, catalogue.texts.drop), input, shown);

  let kept; // the file that is shown, and whether the times of the fields count for it

  function ask(file, text) {
    lab.ask("trace", { ...form.values, file: text, file_name: file.name }, (answer) => {
      kept = { file, text, counts: !answer.unit };
      shown.replaceChildren(...drawn(answer, file.name, catalogue));
    });
  }

  async function take(file) {
    shown.replaceChildren();
    kept = undefined;
    if (!file) {
      lab.fail("trace");
      return;
    }
    const refuse = (code, values) => {
      lab.fail("trace", { code, values: { name: file.name, ...values } });
    };
    if (file.size > MOST) {
      refuse("too_large", { size: written(file.size / 1e6) });
      return;
    }
    let text;
    try {
      text = await file.text();
    } catch (error) { // a folder, for example
      refuse("no_trace", { why: error.message });
      return;
    }
    ask(file, text);
  }

  input.addEventListener("change", () => take(input.files[0]));
  place.addEventListener("dragover", (event) => event.preventDefault());
  place.addEventListener("drop", (event) => {
    event.preventDefault();
    take(event.dataTransfer.files[0]);
  });
  const again = () => kept?.counts && ask(kept.file, kept.text);
  return { place, again };
}

function drawn(answer, name, catalogue) {
  const beside = new Beside(catalogue);
  beside.show(answer.timelines, answer.unit);
  const { unit } = answer;
  const [first, second] = answer.timelines.map((line) => catalogue.texts[line.name] ?? line.name);
  const { columns } = catalogue;
  const heads = [columns.rank, columns.action, first, second, columns.late, columns.longer];
  const rows = () => answer.differences.map(([rank, action, ...times]) =>
    [String(rank), action, ...times.map((time) => written(time, unit))]);
  const [own, other] = [{}, {}];
  for (const [output, { value, other: simulated, unit: of }] of Object.entries(answer.outputs)) {
    own[output] = { value, unit: of };
    other[output] = { value: simulated, unit: of };
  }
  const title = (text) => element("p", { class: "naranhi-lab-name" }, text);
  const differences = folded(`${columns.late}, ${columns.longer}`, () => table(heads, rows()));
  differences.open = true;
  return [
    title(say(catalogue.texts.dropped, { name })), beside.element,
    title(first), results(own, catalogue, { prefix: "file_" }),
    title(second), results(other, catalogue, { prefix: "beside_" }), differences,
  ];
}
