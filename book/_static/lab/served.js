// A page that is opened as a file: browsers load neither modules nor WebAssembly from there.
if (location.protocol === "file:") {
  for (const root of document.querySelectorAll(".naranhi-lab:has([data-run])")) {
    const note = document.createElement("p");
    note.className = "naranhi-lab-failed";
    note.textContent = root.dataset.served;
    root.append(note);
  }
}
