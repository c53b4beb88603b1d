// Makes dist/: the page, the chart library, Pyodide and this checkout's own wheel, nothing else.
import { execFileSync } from "node:child_process";
import { cpSync, mkdirSync, mkdtempSync, readdirSync, rmSync, writeFileSync } from "node:fs";
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
writeFileSync(join(dist, "wheel.json"), JSON.stringify({ wheel }) + "\n");
