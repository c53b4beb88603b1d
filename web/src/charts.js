// Vega-Lite through Vega's interpreter: expressions are evaluated without eval.
import * as vega from "vega";
import { expressionInterpreter } from "vega-interpreter";
import { compile } from "vega-lite";

export async function draw(spec, element) {
  const { spec: full } = compile(spec);
  const runtime = vega.parse(full, null, { ast: true });
  const view = new vega.View(runtime, { expr: expressionInterpreter, renderer: "none" });
  const text = await view.toSVG();
  view.finalize();
  const drawn = new DOMParser().parseFromString(text, "image/svg+xml").documentElement;
  for (const mark of drawn.querySelectorAll("[role=graphics-symbol][aria-label]")) {
    const title = document.createElementNS("http://www.w3.org/2000/svg", "title");
    title.textContent = mark.getAttribute("aria-label");
    mark.prepend(title);
  }
  element.replaceChildren(document.importNode(drawn, true));
}
