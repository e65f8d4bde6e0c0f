// What is said and how numbers are written. The words are in the catalogue of the page's language.
export const say = (text, values = {}) =>
  text.replace(/\{(\w+)\}/g, (place, name) => (name in values ? values[name] : place));

export function failed(catalogue, code, values) {
  const error = new Error(code);
  error.words = say(catalogue.errors[code], values);
  return error;
}

// Three digits; the whole number where it has more.
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) {
    return Math.abs(value) < 1e15 ? value.toLocaleString("en") : value.toExponential(2);
  }
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(3)));
}

const UNITS = {
  s: [[1e-9, "ns"], [1e-6, "µs"], [1e-3, "ms"], [1, "s"]],
  B: [[1, "B"], [2 ** 10, "KiB"], [2 ** 20, "MiB"], [2 ** 30, "GiB"], [2 ** 40, "TiB"]],
};

export function written(value, unit = "") {
  if (typeof value !== "number") return number(value);
  if (unit === "%") return `${number(Number((100 * value).toPrecision(3)))}%`;
  if (!(unit in UNITS)) return number(value);
  if (value === 0) return `0 ${unit}`;
  const fits = UNITS[unit].filter(([scale]) => Math.abs(Number(value.toPrecision(3))) >= scale);
  const [scale, name] = fits.at(-1) ?? UNITS[unit][0];
  return `${number(value / scale)} ${name}`;
}

// What an error says: the package's own words, or those of the catalogue.
export function complaint({ text, code, values = {} }, catalogue) {
  if (text !== undefined) return { lead: catalogue.texts.package, text };
  const named = { ...values };
  if (named.name in catalogue.fields) named.name = catalogue.fields[named.name];
  for (const key of ["low", "high", "actions", "most"]) {
    if (key in named) named[key] = number(named[key]);
  }
  return { lead: say(catalogue.errors[code], named) };
}

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === false || value === undefined) continue;
    made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

export function table(columns, rows) {
  const cells = (tag, row) => row.map((cell) => element(tag, tag === "th" ? { scope: "col" } : {}, cell));
  return element("div", { class: "naranhi-lab-table", tabindex: "0", role: "region", "aria-label": columns.join(", ") },
    element("table", {},
      element("thead", {}, element("tr", {}, ...cells("th", columns))),
      element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells("td", row))))));
}
