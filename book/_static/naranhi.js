// sphinx-copybutton knows seven languages, and Korean is not among them; its messages are global.
if (document.documentElement.lang === "ko" && typeof messages !== "undefined") {
  messages.ko = {
    copy: "복사",
    copy_to_clipboard: "복사",
    copy_success: "복사했습니다",
    copy_failure: "복사하지 못했습니다",
  };
  locale = "ko";
}

// The switch leads to the section that is being read: both languages have the same anchors. But an
// address with settings of a lab stays as it is.
document.addEventListener("click", (event) => {
  const twin = event.target.closest?.("a.naranhi-twin");
  if (!twin) return;
  const sections = [...document.querySelectorAll("article section section[id]")];
  const read = sections.findLast((one) => one.getBoundingClientRect().top < innerHeight / 3);
  twin.hash = location.hash.includes("&") ? location.hash : read ? read.id : "";
  twin.search = location.search; // what is looked for
});

// Paper has no folds to open, and is white.
const folds = () => document.querySelectorAll("details:not([open])");
const look = document.documentElement.dataset;
let opened = [], theme;
addEventListener("beforeprint", () => {
  opened = [...folds()];
  opened.forEach((fold) => { fold.open = true; });
  theme = look.theme;
  look.theme = "light";
});
addEventListener("afterprint", () => {
  opened.forEach((fold) => { fold.open = false; });
  look.theme = theme;
});

// What scrolls sideways can be reached by the keyboard, and shows at its edge that there is more.
const scrolls = ".cell_output :is(pre, .text_html, .text_html > div), div.highlight pre, div.math"
  + ", .pst-scrollable-table-container, .naranhi-record-table, .naranhi-predictions"
  + ", .naranhi-lab-picture, .naranhi-lab-picture > div";
const name = { en: "Scrolls sideways", ko: "옆으로 넘겨 볼 수 있습니다" };
function markScrolling(around) {
  const region = around.querySelector(":scope > mjx-container") ?? around;
  if (around.matches("div.math") && region === around) return;  // not typeset yet
  const wider = region.scrollWidth > region.clientWidth + 1;
  region.classList.toggle("naranhi-more",
    wider && region.scrollLeft + region.clientWidth < region.scrollWidth - 1);
  if (!wider) return;
  region.tabIndex = 0;
  region.setAttribute("role", "region");
  region.ariaLabel ||= name[document.documentElement.lang] ?? name.en;
}
addEventListener("DOMContentLoaded", () => {
  const seen = new ResizeObserver((entries) => entries.forEach((one) => markScrolling(one.target)));
  document.querySelectorAll(scrolls).forEach((region) => {
    seen.observe(region);
    region.addEventListener("scroll", () => markScrolling(region), { passive: true, capture: true });
  });
});
