// Python, in a thread of its own: requests come in, the book's code answers.
let answer;

const FILES = ["pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip"];

async function found(address, options) {
  const response = await fetch(address, options);
  if (!response.ok) throw new Error(`${response.status} ${address}`);
  return response;
}

async function start({ runtime, modules }) {
  // Pyodide waits for ever for a file that is not there.
  const [archive] = await Promise.all([
    found(modules).then((response) => response.arrayBuffer()),
    ...FILES.map((name) => found(`${runtime}/${name}`, { method: "HEAD" })),
  ]);
  const { loadPyodide } = await import(`${runtime}/pyodide.mjs`);
  const python = await loadPyodide({ indexURL: `${runtime}/` });
  python.unpackArchive(archive, "zip", { extractDir: "/home/naranhi" });
  python.runPython("import sys; sys.path.insert(0, '/home/naranhi'); import lab");
  const lab = python.pyimport("lab");
  answer = { ask: (text) => lab.answer(text), fields: (kind) => lab.describe(kind) };
}

self.addEventListener("message", async ({ data: { id, what, content } }) => {
  try {
    if (what === "start") {
      await start(content);
      self.postMessage({ id, answer: "null" });
    } else {
      self.postMessage({ id, answer: answer[what](content) });
    }
  } catch (error) {
    self.postMessage({ id, failure: String(error.message ?? error).trim().split("\n").at(-1) });
  }
});
