// Python in a worker: this project's own wheel in Pyodide. Questions and answers are JSON.
import { loadPyodide } from "./pyodide/pyodide.mjs";

let calculator;

async function bytes(name) {
  return (await fetch(name)).arrayBuffer();
}

async function start() {
  const [python, wheel, compiled] = await Promise.all([
    loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href }),
    fetch("wheel.json")
      .then((answer) => answer.json())
      .then(({ wheel }) => bytes(wheel)),
    bytes("compiled.zip"),
  ]);
  python.FS.mkdirTree("/actcalc");
  for (const archive of [wheel, compiled]) python.unpackArchive(archive, "zip", { extractDir: "/actcalc" });
  python.runPython("import os, sys; sys.path.insert(0, '/actcalc'); os.chdir('/tmp')");
  calculator = python.pyimport("actcalc.cli.calculator");
  postMessage({ kind: "ready", choices: JSON.parse(calculator.choices()) });
}

const started = start().catch((error) => postMessage({ kind: "failed", text: String(error) }));

onmessage = async ({ data: { id, of, question } }) => {
  await started;
  if (!calculator) return;
  const began = performance.now();
  const answer = JSON.parse(calculator.answered(JSON.stringify({ ...JSON.parse(question), of })));
  postMessage({ kind: "answer", id, of, answer, spent: (performance.now() - began) / 1000 });
};
