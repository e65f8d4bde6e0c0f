// One Python for all labs of a page, and another one where it has broken down.
import { failed } from "./words.js";

const here = new URL(".", import.meta.url);
let worker, ready;
let last = 0;
const waiting = new Map();

// What waits fails; who asks next starts Python anew.
function end(why) {
  worker.terminate();
  ready = undefined;
  for (const { reject } of waiting.values()) reject(new Error(why));
  waiting.clear();
}

function send(what, content) {
  return new Promise((resolve, reject) => {
    last += 1;
    waiting.set(last, { resolve, reject });
    worker.postMessage({ id: last, what, content });
  });
}

function receive({ data: { id, answer, failure, broken } }) {
  if (broken) {
    end(failure);
    return;
  }
  const { resolve, reject } = waiting.get(id);
  waiting.delete(id);
  if (failure === undefined) resolve(JSON.parse(answer));
  else reject(new Error(failure));
}

async function launch(catalogue) {
  if (typeof WebAssembly !== "object") throw failed(catalogue, "no_wasm");
  worker = new Worker(new URL("worker.js", here), { type: "module" });
  worker.addEventListener("message", receive);
  worker.addEventListener("error", (event) => end(event.message ?? "worker.js"));
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

export async function fields(catalogue, kind) {
  await start(catalogue);
  return send("fields", kind);
}

export async function ask(catalogue, lab, values) {
  await start(catalogue);
  return send("ask", JSON.stringify({ lab, values }));
}
