// Look a query up in the sections that the build has written down (searchsections.js), best first.
// Each word of the query is weighed by how few sections have it (BM25); one in a title counts more.
const [PAGE, ANCHOR, CHAPTER, TITLE, PROSE, CODE] = [0, 1, 2, 3, 4, 5];
const SHOWN = 50;
const SAID = {
  en: { found: (n) => `${n} ${n === 1 ? "section" : "sections"} found`, none: "Nothing found." },
  ko: { found: (n) => `절 ${n}곳을 찾았습니다.`, none: "찾은 것이 없습니다." },
};
const said = SAID[document.documentElement.lang] ?? SAID.en;
const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");

// The English words of the book, by their stems: memory and memories both have memori.
const stem = (word) => new Stemmer().stemWord(word);
let stems;
function ofStem(wanted) {
  if (!stems) {
    stems = new Map();
    const words = SECTIONS.flatMap((one) => one.join(" ").toLowerCase().match(/[a-z]+/g) ?? []);
    for (const word of new Set(words)) {
      const key = stem(word);
      stems.set(key, [...(stems.get(key) ?? []), word]);
    }
  }
  return stems.get(wanted) ?? [];
}

// How to find a word: Hangul and identifiers anywhere, since Korean words are inflected at their
// ends; other words where a word begins with them, and English ones also in their other forms.
function pattern(word) {
  if (/^[가-힣]/.test(word) || word.includes("_")) return new RegExp(escaped(word), "giu");
  const forms = /^[a-z]+$/.test(word) ? ofStem(stem(word)).map((form) => `${form}(?![a-z])`) : [];
  return new RegExp(`(?<![\\p{L}\\p{N}])(?:${[escaped(word), ...forms].join("|")})`, "giu");
}

const count = (text, found) => text.match(found)?.length ?? 0;

// The telling words of a query, each with its pattern: Korean ones without their particle, or, where
// no section has such a word, without their ending.
function terms(query) {
  const words = query.toLowerCase().match(/[가-힣]+|(?:(?![가-힣])[\p{L}\p{N}_])+/gu) || [];
  const telling = words.filter((word) => !stopwords.includes(word) && !/^[가-힣]$/.test(word));
  return (telling.length ? telling : words).map((given) => {
    let word = given.replace(/(?<=^[가-힣]{2,})(?:에서|으로|[을를이가은는의에로와과도])$/, "");
    let found = pattern(word);
    const anywhere = () => SECTIONS.some((one) => one.some((text) => count(text, found)));
    while (/^[가-힣]{3,}$/.test(word) && !anywhere()) found = pattern(word = word.slice(0, -1));
    return { word, found };
  });
}

// How much of a title the query says: all of it, where the section is about nothing else.
function covered(title, wanted) {
  const words = title.replace(/\(.*\)/, "").match(/[\p{L}\p{N}_]+/gu) || [];
  return words.filter((word) => wanted.some(({ found }) => count(word, found))).length
    / (words.length || 1);
}

function ranked(wanted) {
  const length = SECTIONS.map((one) => one[PROSE].length + 200);
  const mean = length.reduce((a, b) => a + b, 0) / length.length;
  const hits = SECTIONS.map((section, i) => {
    const about = covered(section[TITLE], wanted);
    return { section, i, about, score: 0, words: 0 };
  });
  for (const { found } of wanted) {
    const has = (column) => SECTIONS.map((one) => count(one[column], found));
    const [prose, title, chapter, code] = [PROSE, TITLE, CHAPTER, CODE].map(has);
    const weight = (column) => Math.log(1 + SECTIONS.length / (1 + column.filter(Boolean).length));
    const [rare, rareTitle] = [weight(prose.map((n, i) => n + title[i])), weight(title)];
    for (const hit of hits) {
      const { i } = hit;
      if (!prose[i] && !title[i] && !code[i]) continue;
      const often = prose[i] || (code[i] ? 0.2 : 0);
      hit.score += (rare * often * 2.2) / (often + 1.2 * (0.4 + 0.6 * (length[i] / mean)));
      if (title[i]) hit.score += (0.4 + 1.6 * hit.about) * rareTitle;
      if (chapter[i]) hit.score += (hit.section[ANCHOR] ? 0.3 : 1.8 * hit.about) * rare;
      hit.words += 1;
    }
  }
  return hits.filter((hit) => hit.words).sort((a, b) => b.words - a.words || b.score - a.score);
}

// The sentence with most of the words, with what surrounds it where it is short.
function excerpt(section, wanted) {
  const sentences = section[PROSE].split(/(?<=[.?!:])\s+|\n/);
  const has = (text) => wanted.filter(({ found }) => count(text, found)).length;
  const counts = sentences.map(has);
  let last = counts.indexOf(Math.max(...counts));
  let text = sentences[last];
  while (text.length < 120 && ++last < sentences.length) text += ` ${sentences[last]}`;
  return text.length > 300 ? `${text.slice(0, 300)} …` : text;
}

function marked(text, wanted) {
  const line = document.createElement("p");
  line.className = "context";
  const any = new RegExp(wanted.map(({ found }) => found.source).join("|"), "giu");
  let from = 0;
  for (const hit of text.matchAll(any)) {
    const mark = document.createElement("mark");
    mark.textContent = hit[0];
    line.append(text.slice(from, hit.index), mark);
    from = hit.index + hit[0].length;
  }
  line.append(text.slice(from));
  return line;
}

function show({ section }, wanted) {
  const entry = document.createElement("li");
  const link = document.createElement("a");
  link.href = `${section[PAGE]}.html${section[ANCHOR] && `#${section[ANCHOR]}`}`;
  link.textContent = section[TITLE];
  entry.append(link);
  if (section[ANCHOR]) {
    const chapter = document.createElement("span");
    chapter.className = "naranhi-chapter";
    chapter.textContent = section[CHAPTER];
    entry.append(" ", chapter);
  }
  if (section[PROSE]) entry.append(marked(excerpt(section, wanted), wanted));
  return entry;
}

addEventListener("DOMContentLoaded", () => {
  const query = new URLSearchParams(location.search).get("q")?.normalize("NFKC").trim();
  const results = document.querySelector("#search-results");
  if (!query) return;
  document.querySelectorAll("input[name=q]").forEach((field) => { field.value = query; });
  const wanted = terms(query);
  const hits = wanted.length ? ranked(wanted) : [];
  const status = document.createElement("p");
  status.setAttribute("role", "status");
  status.textContent = hits.length ? said.found(hits.length) : said.none;
  const list = document.createElement("ol");
  list.className = "search";
  list.append(...hits.slice(0, SHOWN).map((hit) => show(hit, wanted)));
  results.replaceChildren(status, list);
  results.dataset.pages = JSON.stringify([...new Set(hits.map((hit) => hit.section[PAGE]))]);
  // The page that the reader goes to marks these words (Sphinx's sphinx_highlight.js).
  // It looks for them anywhere, and letters are everywhere.
  const telling = wanted.map(({ word }) => word).filter((word) => /[가-힣]|.../.test(word));
  localStorage.setItem("sphinx_highlight_terms", telling.join(" "));
});
