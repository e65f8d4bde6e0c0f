// sphinx-copybutton knows seven languages, and Korean is not among them; its messages are global, and
// so are its pictures, whose titles are the names of its buttons.
if (document.documentElement.lang === "ko" && typeof messages !== "undefined") {
  messages.ko = {
    copy: "복사",
    copy_to_clipboard: "복사",
    copy_success: "복사했습니다",
    copy_failure: "복사하지 못했습니다",
  };
  locale = "ko";
  iconCopy = iconCopy.replace(messages.en.copy_to_clipboard, messages.ko.copy_to_clipboard);
  iconCheck = iconCheck.replace(messages.en.copy_success, messages.ko.copy_success);
}

// The theme takes the focus from a button that is pressed, lest its tooltip stay. From the keyboard
// that loses the place, and what the button opens cannot return the focus to it.
document.addEventListener("click", ({ target, detail }) => {
  const button = target.closest?.("button[data-bs-toggle=tooltip]");
  if (button) button.blur = detail ? HTMLElement.prototype.blur : () => {};
}, true);

// What opens over the page is called what opens it.
addEventListener("DOMContentLoaded", () => {
  const openers = {
    "pst-search-dialog": ".search-button",
    "pst-primary-sidebar-modal": ".primary-toggle",
    "pst-secondary-sidebar-modal": ".secondary-toggle",
  };
  for (const [id, opener] of Object.entries(openers)) {
    const [dialog, button] = [document.getElementById(id), document.querySelector(opener)];
    if (dialog && button) dialog.ariaLabel = button.ariaLabel;
  }
});

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

const look = document.documentElement.dataset;

// The button that changes the colours says which ones it has set.
function nameColours() {
  const button = document.querySelector(".theme-switch-button");
  const icon = button?.querySelector(`[data-mode="${look.mode}"]`);
  if (icon) button.ariaLabel = `${button.dataset.bsTitle}: ${icon.title}`;
}
addEventListener("DOMContentLoaded", () => {
  nameColours();
  new MutationObserver(nameColours).observe(document.documentElement, { attributeFilter: ["data-mode"] });
});

// Paper has no folds to open, and is white.
const folds = () => document.querySelectorAll("details:not([open])");
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
const scrolls = ".cell_output :is(pre, .text_html, .text_html > div), div.highlight pre, .math"
  + ", .pst-scrollable-table-container, .naranhi-record-table, .naranhi-predictions"
  + ", .naranhi-lab-picture, .naranhi-lab-picture > div";
const names = { en: "Scrolls sideways", ko: "옆으로 넘겨 볼 수 있습니다" };
const name = names[document.documentElement.lang] ?? names.en;
function markScrolling(around) {
  const formula = around.matches("div.math");
  const region = formula ? around.querySelector(":scope > mjx-container") : around;
  if (!region) return;  // not typeset yet
  // A formula in a line has no width of its own, but where it scrolls.
  const wider = region.clientWidth && region.scrollWidth > region.clientWidth + 1;
  region.classList.toggle("naranhi-more",
    wider && region.scrollLeft + region.clientWidth < region.scrollWidth - 1);
  if (!wider) {
    if (region.ariaLabel !== name) return;
    for (const given of ["tabindex", "role", "aria-label"]) region.removeAttribute(given);
    return;
  }
  region.tabIndex = 0;
  region.setAttribute("role", "group");  // a region would be a landmark, and there are dozens
  region.ariaLabel ||= name;
}
addEventListener("DOMContentLoaded", () => {
  const seen = new ResizeObserver((entries) => entries.forEach((one) => markScrolling(one.target)));
  const regions = document.querySelectorAll(scrolls);
  // A letter in another font may be wider than its box, which stays as it is when its own arrives.
  document.fonts.addEventListener("loadingdone", () => regions.forEach(markScrolling));
  regions.forEach((region) => {
    seen.observe(region);
    region.addEventListener("scroll", () => markScrolling(region), { passive: true, capture: true });
  });
});
