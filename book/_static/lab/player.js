// Step, scrub, play and replay timelines that share an axis.
import { element, say, written } from "./words.js";

const ROUND = 12; // seconds, from the first action to the last
const BEAT = 700; // milliseconds of a step, where nothing should move smoothly
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Player {
  constructor(catalogue) {
    Object.assign(this, { catalogue, lines: [], times: [0], place: 0, frame: 0 });
    const { texts } = catalogue;
    const button = (text, act) => {
      const made = element("button", { type: "button" }, text);
      made.addEventListener("click", act);
      return made;
    };
    this.playing = button(texts.play, () => (this.frame ? this.stop() : this.play()));
    this.scrub = element("input", { type: "range", min: 0, step: 1, "aria-label": texts.scrub });
    this.scrub.addEventListener("input", () => {
      this.stop();
      this.go(Number(this.scrub.value));
    });
    this.said = element("output", { class: "naranhi-lab-said" });
    this.element = element("div", { class: "naranhi-lab-player" },
      button(texts.back, () => this.step(-1)), this.playing, button(texts.forward, () => this.step(1)),
      button(texts.replay, () => { this.stop(); this.go(0); this.play(); }), this.scrub, this.said);
  }

  // Take timelines that are drawn: all moments at which an action begins or ends.
  take(lines, unit = "") {
    this.stop();
    Object.assign(this, { lines, unit });
    const found = lines.flatMap(({ rows, zero }) =>
      rows.flatMap((row) => row.flatMap(([, , , start, end]) => [start - zero, end - zero])));
    this.times = [...new Set([0, ...found])].sort((a, b) => a - b);
    this.scrub.max = this.times.length - 1;
    this.go(this.times.length - 1, false);
  }

  step(by) {
    this.stop();
    this.go(Math.max(0, Math.min(this.times.length - 1, this.place + by)));
  }

  go(place, told = true) {
    this.mark(place);
    const time = this.times[place];
    this.show(place === this.times.length - 1 ? Infinity : time);
    this.said.textContent = told ? this.words(time) : "";
  }

  mark(place) {
    this.place = place;
    this.scrub.value = place;
    this.scrub.setAttribute("aria-valuetext", written(this.times[place], this.unit));
  }

  words(time) {
    const [line] = this.lines;
    if (line.rows.length > 16) return written(time, this.unit);
    const ranks = line.at(time).join(", ");
    return say(this.catalogue.texts.now, { time: written(time, this.unit), ranks });
  }

  show(time) {
    for (const line of this.lines) line.seek(time);
  }

  play() {
    if (this.place >= this.times.length - 1) this.go(0, false);
    this.playing.textContent = this.catalogue.texts.pause;
    this.said.textContent = "";
    const end = this.times.at(-1);
    const begun = performance.now();
    const first = this.place;
    const from = this.times[first];
    const advance = (moment) => {
      const beats = Math.max(0, Math.floor((moment - begun) / BEAT));
      const time = still.matches ? this.times[Math.min(this.times.length - 1, first + beats)]
        : from + ((moment - begun) / 1000 / ROUND) * end;
      if (time >= end) {
        this.stop();
        this.go(this.times.length - 1, false);
        return;
      }
      this.mark(this.times.findLastIndex((one) => one <= time));
      this.show(time);
      this.frame = requestAnimationFrame(advance);
    };
    this.frame = requestAnimationFrame(advance);
  }

  stop() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.playing.textContent = this.catalogue.texts.play;
  }
}
