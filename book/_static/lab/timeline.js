// Draw a timeline: a row is a rank, a box an action. Python has computed all of it.
import { element, say, written } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 58; // pixels, for the names of the ranks
const FOOT = 22; // for the numbers of the axis

function svg(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// About six round numbers from 0 to the end.
function ticks(end) {
  const rough = end / 6;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  return Array.from({ length: Math.floor(end / step + 1e-9) + 1 }, (_, i) => i * step);
}

export class Timeline {
  constructor(catalogue, followed) {
    Object.assign(this, { catalogue, followed, unit: "", time: Infinity });
    this.picture = svg("svg", { class: "naranhi-lab-timeline", tabindex: "0", role: "application" });
    this.said = element("output", { class: "naranhi-lab-said" });
    this.element = element("figure", {}, this.picture, this.said);
    this.picture.addEventListener("pointerover", ({ target }) => this.point(target.dataset.place));
    this.picture.addEventListener("pointerleave", () => this.point(undefined));
    this.picture.addEventListener("keydown", (event) => this.key(event));
    this.picture.addEventListener("blur", () => this.followed(undefined));
    new ResizeObserver(() => this.width !== this.picture.clientWidth && this.redraw())
      .observe(this.picture);
  }

  // Take what Python says of a timeline, on an axis as long as the longest beside it.
  take(line, name, end, unit = "") {
    Object.assign(this, { rows: line.rows, name, end, unit, place: undefined });
    this.zero = Math.min(...line.rows.map((row) => row[0][3]));
    this.redraw();
  }

  clear() {
    this.rows = undefined;
    this.boxes = [];
    this.picture.replaceChildren();
  }

  redraw() {
    if (!this.rows) return;
    this.width = this.picture.clientWidth || 640;
    const ranks = this.rows.length;
    this.row = Math.max(11, Math.min(26, 400 / ranks));
    const height = ranks * this.row + FOOT;
    this.picture.setAttribute("viewBox", `0 0 ${this.width} ${height}`);
    this.picture.setAttribute("height", height);
    this.picture.setAttribute("aria-label", say(this.catalogue.texts.timeline, { name: this.name }));
    const scale = (this.width - LEFT - 8) / (this.end || 1);
    this.x = (time) => LEFT + (time - this.zero) * scale;
    const parts = this.axis(ranks);
    this.boxes = [];
    this.rows.forEach((row, rank) => {
      const chunks = Math.max(...row.map((box) => box[5])) + 1;
      row.forEach((box, place) => parts.push(...this.box(box, rank, place, chunks)));
    });
    this.now = svg("line", { class: "now", y1: 0, y2: ranks * this.row, x1: 0, x2: 0 });
    this.picture.replaceChildren(...parts, this.now);
    this.seek(this.time);
  }

  axis(ranks) {
    const parts = [];
    const every = Math.ceil(14 / this.row);
    for (let rank = 0; rank < ranks; rank += 1) {
      const middle = (rank + 0.5) * this.row;
      parts.push(svg("line", { class: "row", x1: LEFT, x2: this.width - 8, y1: middle, y2: middle }));
      if (rank % every) continue;
      const name = say(this.catalogue.texts.rank, { rank });
      parts.push(svg("text", { x: LEFT - 6, y: middle, class: "rank" }, name));
    }
    for (const tick of ticks(this.end || 1)) {
      const place = { x: this.x(this.zero + tick), y: ranks * this.row + 15, class: "tick" };
      parts.push(svg("text", place, written(tick, tick ? this.unit : "")));
    }
    return parts;
  }

  box([name, kind, microbatch, start, end, chunk, half], rank, place, chunks) {
    const look = this.catalogue.looks[kind];
    const looks = look.chunks[Math.min(chunks, look.chunks.length) - 1];
    const [fill, ink] = looks[Math.min(chunk, looks.length - 1)];
    const x = this.x(start);
    const wide = this.x(end) - x;
    const gap = Math.min(1, wide / 5);
    const high = (half === undefined ? 0.84 : 0.41) * this.row;
    const y = (rank + 0.08 + 0.43 * (half ?? 0)) * this.row;
    const box = svg("rect", {
      x, y, width: wide - gap, height: high, fill: look.color, "fill-opacity": fill,
      stroke: fill < 1 ? look.color : "none", "data-action": name, "data-rank": rank,
      "data-start": start, "data-end": end, "data-microbatch": microbatch ?? "",
      "data-place": this.boxes.length,
    });
    const parts = [box];
    const text = String(microbatch ?? "");
    if (text && high > 9 && wide > 7 * text.length + 3) {
      const middle = { x: x + (wide - gap) / 2, y: y + high / 2, fill: ink, class: "number" };
      parts.push(svg("text", middle, text));
    }
    this.boxes.push({ box, parts, name, kind, microbatch, start, end, rank, place });
    return parts;
  }

  // Show what has begun by a time, measured from the beginning.
  seek(time) {
    this.time = time;
    const now = this.zero + time;
    for (const { parts, start } of this.boxes ?? []) {
      for (const part of parts) part.classList.toggle("later", start >= now && time < this.end);
    }
    if (!this.now) return;
    this.now.style.display = time < this.end ? "" : "none";
    if (time < this.end) {
      this.now.setAttribute("x1", this.x(now));
      this.now.setAttribute("x2", this.x(now));
    }
  }

  // What the ranks do at a time, in words.
  at(time) {
    const now = this.zero + time;
    return this.rows.map((row, rank) => {
      const runs = row.filter(([, , , start, end]) => start < now && now <= end);
      const { texts } = this.catalogue;
      return runs.length ? say(texts.runs, { rank, name: runs.map(([name]) => name).join(" + ") })
        : say(texts.waits, { rank });
    });
  }

  point(place) {
    const box = place === undefined ? undefined : this.boxes[place];
    this.place = box ? Number(place) : undefined;
    this.followed(box?.microbatch ?? undefined);
    this.say(box);
  }

  say(box) {
    if (!box) return;
    const { texts, kinds } = this.catalogue;
    const values = {
      ...box, kind: kinds[box.kind],
      start: written(box.start - this.zero, this.unit), end: written(box.end - this.zero, this.unit),
    };
    this.said.textContent = say(box.microbatch === null ? texts.update : texts.action, values);
  }

  follow(microbatch) {
    for (const { parts, microbatch: own } of this.boxes ?? []) {
      for (const part of parts) {
        part.classList.toggle("other", microbatch !== undefined && own !== microbatch);
      }
    }
    for (const { box } of this.boxes ?? []) box.classList.remove("here");
    if (this.place !== undefined) this.boxes[this.place]?.box.classList.add("here");
  }

  key(event) {
    const step = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
    if (event.key === "Escape") this.point(undefined);
    if (!step) return;
    event.preventDefault();
    const from = this.boxes[this.place];
    if (!from) {
      this.point(0);
      return;
    }
    const rank = Math.max(0, Math.min(this.rows.length - 1, from.rank + step[1]));
    const row = this.boxes.filter((box) => box.rank === rank);
    const near = (box) => Math.abs(box.start - from.start);
    const place = step[1] ? row.indexOf(row.reduce((best, box) => (near(box) < near(best) ? box : best)))
      : Math.max(0, Math.min(row.length - 1, from.place + step[0]));
    this.point(this.boxes.indexOf(row[place]));
  }
}

// Which colour means what.
export function legend(lines, catalogue) {
  const boxes = lines.flatMap((line) => line.rows.flat());
  const parts = Object.entries(catalogue.looks)
    .filter(([kind]) => boxes.some((box) => box[1] === kind))
    .map(([kind, { color }]) => key(catalogue.kinds[kind], color, 1));
  const chunks = boxes.reduce((most, box) => Math.max(most, box[5] + 1), 1);
  const { chunks: looks } = catalogue.looks.F;
  for (let chunk = 0; chunk < Math.min(chunks, looks.length) && chunks > 1; chunk += 1) {
    const [fill] = looks[Math.min(chunks, looks.length) - 1][chunk];
    parts.push(key(say(catalogue.texts.chunk, { chunk }), "var(--naranhi-faint)", fill));
  }
  return element("p", { class: "naranhi-lab-legend" }, ...parts);
}

function key(word, color, fill) {
  const sample = element("i", { style: `--box: ${color}; --fill: ${100 * fill}%`, "aria-hidden": "true" });
  return element("span", {}, sample, word);
}

export const length = (line) => {
  const zero = Math.min(...line.rows.map((row) => row[0][3]));
  return Math.max(...line.rows.map((row) => Math.max(...row.slice(-2).map((box) => box[4])))) - zero;
};

