// The schedule lab: timelines, what they cost, and a file to compare with.
import * as drop from "./drop.js";
import { Player } from "./player.js";
import { actions, folded, results } from "./results.js";
import { Timeline, legend, length } from "./timeline.js";
import { element, say, written } from "./words.js";

const title = (name, catalogue) => catalogue.choices[name] ?? catalogue.texts[name] ?? name;

// Timelines on one axis, one below the other, of which all follow the same micro-batch.
export class Beside {
  constructor(catalogue) {
    this.catalogue = catalogue;
    const followed = (microbatch) => this.lines.forEach((line) => line.follow(microbatch));
    this.lines = [new Timeline(catalogue, followed), new Timeline(catalogue, followed)];
    this.player = new Player(catalogue);
    this.tables = element("div");
    this.key = element("div");
    this.heads = this.lines.map(() => element("p", { class: "naranhi-lab-name" }));
    const drawn = this.lines.flatMap((line, i) => [this.heads[i], line.element]);
    this.element = element("div", {}, this.key, ...drawn, this.player.element, this.tables);
  }

  show(timelines, unit = "") {
    const end = Math.max(...timelines.map(length));
    const names = timelines.map((line) => title(line.name, this.catalogue));
    this.key.replaceChildren(legend(timelines, this.catalogue));
    this.lines.forEach((line, i) => {
      line.element.hidden = this.heads[i].hidden = !(i in timelines);
      this.heads[i].textContent = names[i] ?? "";
      if (i in timelines) line.take(timelines[i], names[i], end, unit);
      else line.clear();
    });
    this.player.take(this.lines.slice(0, timelines.length), unit);
    this.tables.replaceChildren(...timelines.map((line, i) =>
      folded(`${this.catalogue.texts.table}: ${names[i]}`, () => actions(line, unit, this.catalogue))));
  }
}

export function make(lab, body) {
  const { catalogue } = lab;
  const beside = new Beside(catalogue);
  const numbers = element("div");
  body.append(beside.element, numbers);
  let csv = "";
  let dropped;
  return {
    // Who begins to write a schedule begins with the one that is drawn.
    changed(form, name) {
      const { own } = form.inputs;
      if (name === "schedule" && form.values.schedule === "own" && !own.value.trim()) own.value = csv;
      dropped?.again();
    },
    opened(form) {
      dropped = drop.make(lab, form);
      body.append(dropped.place);
    },
    show(answer) {
      csv = answer.csv;
      beside.show(answer.timelines);
      const parts = [results(answer.outputs, catalogue)];
      if (answer.compared) {
        const [, { name }] = answer.timelines;
        parts.push(element("p", { class: "naranhi-lab-name" }, title(name, catalogue)));
        parts.push(results(answer.compared, catalogue, { prefix: "compared_" }));
        if (answer.share !== 1) {
          const share = written(answer.share);
          parts.push(element("p", {}, say(catalogue.texts.shared, { share })));
        }
      }
      numbers.replaceChildren(...parts);
    },
  };
}
