// Questions that the reader answers first (book/_ext/naranhi_predict.py makes them). What the page
// answers comes from what cells show: <table data-answer data-formula data-measured>. Guesses stay
// in this browser's storage, by chapter and name, and go nowhere.
(() => {
  const KEY = "naranhi-predict";
  const CLOSE = 0.1;  // of the axis
  const SAID = {
    en: {
      guess: "your guess", formula: "formula", measured: "measured",
      none: "First a guess, then the answer. Or show it without one.",
      nan: (text) => `“${text}” is not a number. Write it in digits, such as 12.5.`,
      range: (low, high) => `The answer lies between ${low} and ${high}. Guess a number there.`,
      near: (what) => `Your guess is within 2% of the ${what}.`,
      over: (ratio, what) => `Your guess is ${ratio} times the ${what}.`,
      under: (ratio, what) => `The ${what} is ${ratio} times your guess.`,
      off: (gap, what) => `Your guess is ${gap} away from the ${what}.`,
      source: { measured: "measured value", formula: "value of the formula" },
      right: "Right.", wrong: "Not this time.", skipped: "Shown without a guess.",
      lost: "This browser stores nothing, so the guess is gone when you leave the page.",
      cleared: "All guesses are deleted.",
    },
    ko: {
      guess: "내 예상", formula: "공식", measured: "측정",
      none: "먼저 예상을 적어 보세요. 예상 없이 답만 볼 수도 있습니다.",
      nan: (text) => `‘${text}’: 숫자가 아닙니다. 12.5처럼 숫자로 적어 주세요.`,
      range: (low, high) => `답은 ${low} 이상 ${high} 이하입니다. 이 범위에서 예상해 보세요.`,
      near: (what) => `예상과 ${what}의 차이가 2% 이내입니다.`,
      over: (ratio, what) => `예상이 ${what}의 ${ratio}배입니다.`,
      under: (ratio, what) => `${what}이 예상의 ${ratio}배입니다.`,
      off: (gap, what) => `예상과 ${what}의 차이: ${gap}`,
      source: { measured: "측정값", formula: "공식의 값" },
      right: "맞았습니다.", wrong: "이번에는 빗나갔습니다.", skipped: "예상 없이 답을 펼쳤습니다.",
      lost: "이 브라우저에는 저장할 수 없어서, 페이지를 떠나면 예상이 사라집니다.",
      cleared: "예상을 모두 지웠습니다.",
    },
  };
  const said = SAID[document.documentElement.lang] ?? SAID.en;
  document.documentElement.classList.add("naranhi-script");  // before anything is painted

  // ---- what is kept ----

  let guesses = {}, stored = localStorage instanceof Storage;  // not what layout.html has instead
  function read() {  // again before each use: another tab may have written, or deleted all
    if (!stored) return;
    try {
      guesses = { ...JSON.parse(localStorage.getItem(KEY)) };
    } catch {
      guesses = {};
    }
  }
  read();
  function keep(chapter, name, entry) {
    read();
    guesses[chapter] = { ...guesses[chapter], [name]: entry };
    try {
      localStorage.setItem(KEY, JSON.stringify(guesses));
    } catch {
      stored = false;  // the reader is told
    }
  }

  // ---- numbers ----

  const exact = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
  const large = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
  function written(value) {
    if (value && Math.abs(value) < 1e-3) return Number(value.toPrecision(3)).toExponential();
    return (Math.abs(value) < 999.5 ? exact : large).format(value);
  }
  function parsed(given) {  // also in wide digits, or with a minus that is no hyphen
    const text = given.normalize("NFKC").trim().replace("\u2212", "-");
    return /^[-+]?(\d+|\d{1,3}(,\d{3})+)?(\.\d+)?(e[-+]?\d+)?$/i.test(text)
      ? Number(text.replaceAll(",", "")) : NaN;
  }

  class Prediction {
    constructor(root) {
      const { predict, chapter, unit = "", scale, low, high } = root.dataset;
      Object.assign(this, { root, name: predict, chapter, unit, scale });
      [this.low, this.high] = [Number(low), Number(high)];
      [this.form, this.status] = [root.querySelector("form"), root.querySelector("[role=status]")];
      this.labels = [...root.querySelectorAll("input[type=radio]")]
        .map((radio) => radio.parentElement.textContent.trim());
      this.form.addEventListener("submit", (event) => { event.preventDefault(); this.guess(); });
      this.form.querySelector("[data-skip]").addEventListener("click", () => this.settle(null));
      this.slider = this.form.querySelector("input[type=range]");
      if (this.slider) this.follow();
      const before = guesses[chapter]?.[predict]?.guess;
      if (before === null || typeof before === "number") this.show(before);
    }

    follow() {  // the slider and the field say the same, also aloud
      const field = this.form.elements.guess;
      const say = (value) => this.slider.setAttribute("aria-valuetext", this.written(value));
      say(this.low);
      this.slider.addEventListener("input", () => {
        field.value = this.rounded(this.value(Number(this.slider.value)));
        say(Number(field.value));
      });
      field.addEventListener("input", () => {
        const value = parsed(field.value), at = this.at(value);
        if (!(at >= 0 && at <= 1)) return;
        this.slider.value = at;
        say(value);
      });
    }

    get answers() {  // {formula, measured}, in the order of the page
      const { formula, measured } = document.querySelector(`[data-answer="${this.name}"]`).dataset;
      return Object.entries({ formula, measured }).filter(([, value]) => value !== undefined);
    }

    // Where a value is on the axis, from 0 to 1, and the value there.
    at(value) {
      const map = this.scale === "log" ? Math.log : Number;
      return (map(value) - map(this.low)) / (map(this.high) - map(this.low));
    }
    value(at) {
      const { low, high } = this;
      return this.scale === "log" ? low * (high / low) ** at : low + (high - low) * at;
    }
    rounded(value) {  // as a person would say it
      const span = this.high - this.low;
      const near = this.scale === "log" ? Number(value.toPrecision(2))
        : Number(value.toFixed(Math.max(0, 2 - Math.floor(Math.log10(span)))));
      return String(Math.min(this.high, Math.max(this.low, near)));
    }
    written(value) {
      if (this.labels.length) return this.labels[value] ?? written(value);
      return written(value) + this.unit.replace(/^(?=[^%가-힣])/, " ");  // 12%, 12배, 12 ms
    }

    guess() {
      const field = this.form.elements.guess, text = field.value.trim(), value = parsed(text);
      const wrong = text === "" ? said.none : Number.isNaN(value) ? said.nan(text)
        : !this.labels.length && !(value >= this.low && value <= this.high)
          ? said.range(written(this.low), this.written(this.high)) : "";
      if (this.slider) {
        field.setAttribute("aria-invalid", Boolean(wrong));
        if (wrong) field.focus();
      }
      if (wrong) this.status.textContent = wrong;
      else this.settle(value);
    }

    settle(value) {
      const [, truth] = this.answers.at(-1);
      const gap = this.labels.length ? Number(value !== Number(truth))
        : Math.abs(this.at(value) - this.at(Number(truth)));
      keep(this.chapter, this.name, value === null ? { guess: null } : { guess: value, off: gap });
      this.show(value);
      this.status.tabIndex = -1;
      this.status.focus();
    }

    show(value) {
      const rows = [...(value === null ? [] : [["guess", String(value)]]), ...this.answers];
      const table = document.createElement("table");
      table.innerHTML = `<tbody></tbody>${this.labels.length ? "" : "<tfoot aria-hidden='true'>"
        + "<tr><td colspan='2'></td><td class='naranhi-axis'><div><span></span><span></span></div></td>"
        + "</tr></tfoot>"}`;
      for (const [kind, text] of rows) {
        const row = table.tBodies[0].insertRow();
        row.innerHTML = `<th scope="row">${said[kind]}</th><td data-output="${kind}"></td>`;
        const cell = row.cells[1];
        cell.dataset.value = text;
        cell.textContent = this.written(Number(text));
        if (this.labels.length) continue;
        row.insertAdjacentHTML("beforeend", "<td class='naranhi-axis' aria-hidden='true'><i></i></td>");
        const at = Math.min(1, Math.max(0, this.at(Number(text))));
        row.querySelector("i").style.left = `${100 * at}%`;
      }
      table.querySelectorAll("tfoot span").forEach((end, n) => {
        end.textContent = this.written(n ? this.high : this.low);
      });
      const sentence = document.createElement("p");
      sentence.textContent = [this.sentence(value), stored ? "" : said.lost].join(" ").trim();
      this.status.replaceChildren(sentence, table);
      this.root.dataset.state = "shown";
      document.querySelectorAll(`.naranhi-covered-${this.name}`).forEach((cell) => {
        cell.classList.remove(`naranhi-covered-${this.name}`);
        if (!/naranhi-covered-/.test(cell.className)) cell.classList.remove("naranhi-covered");
      });
    }

    sentence(guess) {
      if (guess === null) return said.skipped;
      const [kind, text] = this.answers.at(-1), truth = Number(text), what = said.source[kind];
      if (this.labels.length) return guess === truth ? said.right : said.wrong;
      if (Math.abs(guess - truth) <= 0.02 * Math.abs(truth)) return said.near(what);
      if (guess * truth <= 0) return said.off(this.written(Math.abs(guess - truth)), what);
      const ratio = written(Math.max(guess / truth, truth / guess));
      return guess / truth > 1 ? said.over(ratio, what) : said.under(ratio, what);
    }
  }

  // ---- how well, by chapter ----

  function overview(root) {
    read();
    for (const row of root.querySelectorAll("[data-chapter]")) {
      const { chapter, questions } = row.dataset;
      const made = questions.split(" ").map((name) => guesses[chapter]?.[name])
        .filter((one) => typeof one?.guess === "number");
      const close = made.filter(({ off }) => off <= CLOSE);
      for (const [kind, found] of Object.entries({ guessed: made, close })) {
        const cell = row.querySelector(`[data-output=${kind}]`);
        cell.dataset.value = found.length;
        cell.textContent = made.length ? found.length : "–";
      }
    }
  }

  addEventListener("DOMContentLoaded", () => {
    const predictions = [...document.querySelectorAll(".naranhi-predict")]
      .map((root) => new Prediction(root));
    const uncover = () => {  // a link that leads to what is covered
      let id = location.hash.slice(1);
      try { id = decodeURIComponent(id); } catch { /* a % that encodes nothing */ }
      const cell = document.getElementById(id)?.closest(".naranhi-covered");
      if (!cell) return;
      predictions.filter(({ name }) => cell.matches(`.naranhi-covered-${name}`))
        .forEach((one) => one.show(null));
      document.querySelector(":target")?.scrollIntoView();
    };
    addEventListener("hashchange", uncover);
    uncover();
    document.querySelectorAll(".naranhi-predictions").forEach((root) => {
      overview(root);
      addEventListener("storage", () => overview(root));  // from another tab
      addEventListener("pageshow", () => overview(root));  // or from before, by the back button
      root.querySelector("[data-clear]").addEventListener("click", () => {
        guesses = {};
        localStorage.removeItem(KEY);
        overview(root);
        root.querySelector("[role=status]").textContent = said.cleared;
      });
    });
  });
})();
