// One Python for all labs of a page.
import { failed } from "./words.js";

const here = new URL(".", import.meta.url);
let worker, ready;
let last = 0;
const waiting = new Map();

function send(what, content) {
  return new Promise((resolve, reject) => {
    last += 1;
    waiting.set(last, { resolve, reject });
    worker.postMessage({ id: last, what, content });
  });
}

function receive({ data: { id, answer, failure } }) {
  const { resolve, reject } = waiting.get(id);
  waiting.delete(id);
  if (failure === undefined) resolve(JSON.parse(answer));
  else reject(new Error(failure));
}

function lost(event) {
  for (const { reject } of waiting.values()) reject(new Error(event.message ?? "worker.js"));
  waiting.clear();
}

async function launch(catalogue) {
  if (typeof WebAssembly !== "object") throw failed(catalogue, "no_wasm");
  worker = new Worker(new URL("worker.js", here), { type: "module" });
  worker.addEventListener("message", receive);
  worker.addEventListener("error", lost);
  try {
    await send("start", {
      runtime: new URL(`../${catalogue.runtime}`, here).href,
      modules: new URL(catalogue.modules, here).href,
    });
  } catch (error) {
    worker.terminate();
    throw failed(catalogue, "runtime", { why: error.message });
  }
}

// Start Python, unless it runs; what failed can be tried again.
export function start(catalogue) {
  ready ??= launch(catalogue).catch((error) => {
    ready = undefined;
    throw error;
  });
  return ready;
}

export const fields = (kind) => send("fields", kind);
export const ask = (lab, values) => send("ask", JSON.stringify({ lab, values }));
