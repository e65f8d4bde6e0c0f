// A page of the site as a part of one document: without what only a site has, its links leading to
// the other parts. Python (printed.py) calls these functions in Chromium, which reads HTML as the
// reader's browser does and writes XHTML without a slip.
const SITE_ONLY = "a.headerlink, script, style, button, input, label, form"
  + ", .naranhi-predictions, .naranhi-lab-start";
// Words of code in its own colour: as elements they would be half of the PDF, which names each one.
const PLAIN = ".highlight :is(span.n, span.nn, span.p, span.w)";
const ADDRESS = {
  pdf: (page, anchor) => `#${page}${anchor && `--${anchor}`}`,
  epub: (page, anchor) => `${page}.xhtml${anchor && `#${anchor}`}`,
};

async function part(html, { page, pages, kind }) {
  const read = new DOMParser().parseFromString(html, "text/html");
  const article = read.querySelector("article.bd-article");
  article.append(...read.querySelectorAll(".naranhi-stamp"));
  article.querySelectorAll(SITE_ONLY).forEach((one) => one.remove());
  article.querySelectorAll(PLAIN).forEach((one) => one.replaceWith(...one.childNodes));
  const links = [...article.querySelectorAll("a[href]")].flatMap((link) => {
    const href = link.getAttribute("href");
    if (/^[a-z]+:/.test(href)) return [];
    const inside = href.match(/^(?:([\w-]+)\.html)?(?:#(.*))?$/);
    const [other, anchor] = [inside?.[1] ?? page, decodeURIComponent(inside?.[2] ?? "")];
    if (!inside || !pages.includes(other)) {
      link.replaceWith(...link.childNodes);
      return [];
    }
    link.setAttribute("href", ADDRESS[kind](other, anchor));
    return [[other, anchor]];
  });
  const named = [...article.querySelectorAll("[id]")].filter((one) => !one.closest("svg"));
  const words = (heading) => heading.textContent.replace(/\s+/g, " ").trim();
  const facts = {
    page,
    links,
    title: words(article.querySelector("h1")),
    ids: named.map((one) => one.id),
    sections: [...article.querySelectorAll("section > section[id] > h2")]
      .map((heading) => [heading.parentNode.id, words(heading)]),
  };
  if (kind === "pdf") {
    named.forEach((one) => { one.id = `${page}--${one.id}`; });
    // A heading may go to the next sheet with what follows it, and its section begins on this one.
    for (const heading of article.querySelectorAll("section[id] > :is(h1, h2, h3, h4)")) {
      heading.id = heading.parentNode.id;
      heading.parentNode.removeAttribute("id");
    }
    article.querySelectorAll("details").forEach((one) => { one.open = true; });
    article.id = page;
    return { ...facts, markup: article.outerHTML };
  }
  for (const formula of article.querySelectorAll(".math")) await setInMathML(formula);
  // Within <summary> there may be no paragraphs, and a closed fold says the first of the two.
  article.querySelectorAll("summary p.expanded").forEach((one) => one.remove());
  article.querySelectorAll("summary p").forEach((one) => one.replaceWith(...one.childNodes));
  const holds = ["svg", "math"].filter((name) => article.querySelector(name));
  return { ...facts, holds, markup: wellFormed(article) };
}

// Readers of ePubs run no MathJax, but they know MathML.
async function setInMathML(formula) {
  const number = formula.querySelector(".eqno");
  number?.remove();
  const [, tex] = formula.textContent.trim().match(/^\\[([](.*)\\[)\]]$/s);
  const made = await MathJax.tex2mmlPromise(tex, { display: formula.matches("div") });
  formula.innerHTML = made.replace(/ data-[\w-]+="[^"]*"/g, "");
  if (formula.querySelector("merror")) throw new Error(`no formula: ${tex}`);
  formula.firstElementChild.setAttribute("alttext", tex.trim());
  if (number) formula.prepend(number);
}

function wellFormed(article) {
  const text = [...article.children].map((one) => new XMLSerializer().serializeToString(one));
  return text.join("\n").replace(/[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\u{10000}-\u{10FFFF}]/gu, "");
}

async function typeset(markup) {
  document.body.innerHTML = markup;
  await MathJax.typesetPromise();
  await document.fonts.ready;
  const wrong = document.querySelector("mjx-merror");
  if (wrong) throw new Error(`no formula: ${wrong.textContent}`);
}
