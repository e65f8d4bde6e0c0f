// The only script of a lab that a page loads by itself: it waits for a click.
const labs = [...document.querySelectorAll(".naranhi-lab")];
// The lab that a link leads to, with its settings: #lab-schedule&stages=4
const named = () => labs.find((root) => location.hash.slice(1).split("&")[0] === root.id);

async function run(root, button) {
  if (root.dataset.state === "loading") return;
  root.dataset.state = "loading";
  button.setAttribute("aria-disabled", true); // and not disabled, or the focus would be lost
  const size = button.nextElementSibling;
  const said = size.textContent;
  size.textContent = root.dataset.loading;
  try {
    const { open } = await import("./main.js");
    await open(root);
  } catch (error) {
    console.warn(error);
    root.dataset.state = "error";
    button.removeAttribute("aria-disabled");
    size.textContent = said;
    const note = root.querySelector(".naranhi-lab-failed") ?? document.createElement("p");
    note.className = "naranhi-lab-failed";
    note.setAttribute("role", "alert");
    note.textContent = error.words ?? root.dataset.failed;
    root.append(note);
  }
}

for (const root of labs) {
  const button = root.querySelector("button[data-run]");
  if (!button) continue;
  button.closest("p").hidden = false;
  button.addEventListener("click", () => run(root, button));
}
named()?.scrollIntoView();
