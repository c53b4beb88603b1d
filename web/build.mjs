// Makes dist/: the page, the chart library, Pyodide and this checkout's own wheel, nothing else.
import { execFileSync } from "node:child_process";
import { cpSync, mkdirSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const dist = join(here, "dist");
rmSync(dist, { recursive: true, force: true });
mkdirSync(join(dist, "pyodide"), { recursive: true });

for (const name of ["index.html", "style.css"]) cpSync(join(here, "src", name), join(dist, name));
await build({
  entryPoints: [join(here, "src", "main.js"), join(here, "src", "worker.js"), join(here, "src", "charts.js")],
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2022",
  outdir: dist,
  external: ["./pyodide/*", "./charts.js"],
  legalComments: "none",
});

const runtime = join(here, "node_modules", "pyodide");
for (const name of ["pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json"])
  cpSync(join(runtime, name), join(dist, "pyodide", name));

const made = mkdtempSync(join(tmpdir(), "actcalc-wheel-"));
const python = process.env.PYTHON ?? "python3";
execFileSync(python, ["-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", made, join(here, "..")], {
  stdio: "inherit",
});
const wheel = readdirSync(made).find((name) => name.endsWith(".whl"));
cpSync(join(made, wheel), join(dist, wheel));
rmSync(made, { recursive: true, force: true });
await compile(join(dist, wheel));
writeFileSync(join(dist, "wheel.json"), JSON.stringify({ wheel }) + "\n");

// Python's own cache of the wheel's modules, made by the very Python that will read it: the page
// then need not compile what it imports. Only of the modules that answers import.
async function compile(path) {
  const { loadPyodide } = await import("pyodide");
  const python = await loadPyodide();
  python.FS.mkdirTree("/actcalc");
  python.unpackArchive(new Uint8Array(readFileSync(path)), "zip", { extractDir: "/actcalc" });
  const made = python.runPython(`
import io, json, os, py_compile, sys, zipfile
sys.path.insert(0, "/actcalc")
os.chdir("/tmp")
from actcalc.cli import calculator
calculator.choices()
for flags in ({}, {"device": "h100-80gb", "tp": 2, "pp": 2, "vpp": 2, "global_batch": 8, "lora_rank": 8}):
    for of in ("memory", "compare"):
        calculator.answered(json.dumps({"of": of, "model": "llama-3-8b", "flags": flags}))
archive = io.BytesIO()
with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as packed:
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] == "actcalc" and module.__file__:
            mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
            found = py_compile.compile(module.__file__, doraise=True, invalidation_mode=mode)
            packed.write(found, os.path.relpath(found, "/actcalc"))
archive.getvalue()
`);
  writeFileSync(join(dist, "compiled.zip"), made.toJs());
}
