// Python, in a thread of its own: requests come in, the book's code answers.
let answer;
let fromPython; // whether an error is one of Python's

const SCRIPTS = ["pyodide.mjs", "pyodide.asm.mjs"];
const FILES = ["pyodide.asm.wasm", "python_stdlib.zip"];

async function found(address, options) {
  const response = await fetch(address, options);
  if (!response.ok) throw new Error(`${response.status} ${address}`);
  return response;
}

async function bytes(address) {
  return (await found(address)).arrayBuffer();
}

// Pyodide waits for ever for a file that does not arrive, so it gets them when they are here.
async function load(runtime) {
  const addresses = FILES.map((name) => `${runtime}/${name}`);
  const [files] = await Promise.all([
    Promise.all(addresses.map(bytes)),
    ...SCRIPTS.map((name) => found(`${runtime}/${name}`, { method: "HEAD" })),
  ]);
  const fromNetwork = self.fetch;
  self.fetch = (address, options) => {
    const file = files[addresses.indexOf(new URL(address, `${runtime}/`).href)];
    if (!file) return fromNetwork(address, options);
    return Promise.resolve(new Response(file, { headers: { "Content-Type": "application/wasm" } }));
  };
  try {
    const { loadPyodide } = await import(`${runtime}/pyodide.mjs`);
    return await loadPyodide({ indexURL: `${runtime}/` });
  } finally {
    self.fetch = fromNetwork;
  }
}

async function start({ runtime, modules }) {
  const [archive, python] = await Promise.all([bytes(modules), load(runtime)]);
  python.unpackArchive(archive, "zip", { extractDir: "/home/naranhi" });
  python.runPython("import sys; sys.path.insert(0, '/home/naranhi'); import lab");
  const lab = python.pyimport("lab");
  const { PythonError } = python.ffi; // which it no longer tells when it has broken down
  fromPython = (error) => error instanceof PythonError;
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
    // After an error of another kind, of a stack or a memory that is full, Pyodide answers no more.
    const broken = what !== "start" && !fromPython(error);
    const failure = String(error.message ?? error).trim().split("\n").at(-1);
    self.postMessage({ id, failure, broken });
  }
});
