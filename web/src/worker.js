// Python in a worker: this project's own wheel in Pyodide. Questions and answers are JSON.
import { loadPyodide } from "./pyodide/pyodide.mjs";

let calculator;
let newest = 0;

async function start() {
  const [python, wheel] = await Promise.all([
    loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href }),
    fetch("wheel.json")
      .then((answer) => answer.json())
      .then(({ wheel }) => fetch(wheel))
      .then((answer) => answer.arrayBuffer()),
  ]);
  python.FS.mkdirTree("/actcalc");
  python.unpackArchive(wheel, "zip", { extractDir: "/actcalc" });
  python.runPython("import os, sys; sys.path.insert(0, '/actcalc'); os.chdir('/tmp')");
  calculator = python.pyimport("actcalc.cli.calculator");
  postMessage({ kind: "ready", choices: JSON.parse(calculator.choices()) });
}

const started = start().catch((error) => postMessage({ kind: "failed", text: String(error) }));

onmessage = async ({ data }) => {
  await started;
  if (!calculator) return;
  newest = Math.max(newest, data.id);
  if (data.id < newest) return;
  const question = JSON.parse(data.question);
  for (const of of ["memory", "compare"]) {
    const answer = JSON.parse(calculator.answered(JSON.stringify({ ...question, of })));
    postMessage({ kind: "answer", id: data.id, of, answer });
    if (answer.error) return;
  }
};
