// The form, its state in the address, and the answers of the worker as tables and charts.
const form = document.getElementById("form");
const status_ = document.getElementById("status");
const answers = document.getElementById("answers");
const copying = document.getElementById("copy");
const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
const charts = import("./charts.js");
const NUMBERS = [
  "layers", "seq", "micro_batch", "global_batch", "tp", "pp", "vpp", "cp", "ep", "etp", "dp", "zero", "lora_rank", "base_bits",
];

let config = null; // text of a config.json that was dropped
let asked = 0; // number of the newest question
let question = ""; // the newest question
let open = []; // its answers that were not asked for yet
let computing = false;
let shown = null; // the last answer, for copying
let drawing = 0;

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) if (value) made.setAttribute(key, value);
  return made;
}

function state() {
  const found = {};
  for (const field of form.elements) {
    if (!field.name || field.name === "model") continue;
    if (field.type === "checkbox") {
      if (field.checked) found[field.name] = true;
    } else if (field.value.trim() !== "") {
      found[field.name] = NUMBERS.includes(field.name) ? Number(field.value) : field.value.trim();
    }
  }
  return found;
}

function remember() {
  const flags = state();
  const words = new URLSearchParams({ model: config ? "config.json" : form.elements.model.value });
  for (const [key, value] of Object.entries(flags)) words.set(key, value === true ? "1" : String(value));
  history.replaceState(null, "", "#" + words.toString());
}

function recall() {
  const words = new URLSearchParams(location.hash.slice(1));
  for (const [key, value] of words) {
    const field = form.elements.namedItem(key);
    if (!field || !("value" in field)) continue;
    if (field.type === "checkbox") field.checked = value === "1";
    else if (key !== "model" || value !== "config.json") field.value = value;
  }
}

function ask() {
  clearTimeout(waiting);
  remember();
  document.body.classList.add("busy");
  const narrow = answers.clientWidth < 700;
  question = JSON.stringify({
    model: form.elements.model.value.trim(),
    config,
    flags: state(),
    width: narrow ? Math.max(300, answers.clientWidth) : 720,
  });
  asked += 1;
  open = ["memory", "compare"];
  next();
}

// One answer at a time, of the newest question: what was typed meanwhile is never queued.
function next() {
  if (computing || open.length === 0) return;
  computing = true;
  worker.postMessage({ id: asked, of: open.shift(), question });
}

let waiting = 0;
function soon() {
  clearTimeout(waiting);
  waiting = setTimeout(ask, 60);
}

function table(sheet) {
  const made = element("table");
  const head = made.createTHead().insertRow();
  for (const column of sheet.columns)
    head.append(element("th", column.title, { scope: "col", class: column.align === "left" && "left" }));
  const body = made.createTBody();
  for (const row of sheet.rows) {
    const line = body.insertRow();
    line.className = row.style;
    row.cells.forEach((cell, at) => {
      const left = sheet.columns[at].align === "left";
      line.append(element(at === 0 && left ? "th" : "td", cell, { scope: at === 0 && left && "row", class: left && "left" }));
    });
  }
  const scroll = element("div", undefined, { class: "scroll", role: "region", tabindex: "0", "aria-label": sheet.title || "table" });
  scroll.append(made);
  return scroll;
}

// Tables are to be seen before charts take the time to be drawn.
const painted = () => new Promise((then) => requestAnimationFrame(() => setTimeout(then)));

function section(answer) {
  const made = element("section", undefined, { "data-kind": answer.kind });
  answer.sheets.forEach((sheet, at) => {
    if (sheet.title) made.append(element(at ? "h3" : "h2", sheet.title));
    for (const line of sheet.above) made.append(element("p", line, { class: "soft" }));
    if (sheet.columns.length) made.append(table(sheet));
    for (const line of sheet.below) made.append(element("p", line));
    for (const note of sheet.notes) made.append(element("p", "Note: " + note, { class: "soft" }));
  });
  if (answer.note) made.append(element("p", answer.note, { class: "soft" }));
  const command = element("p", "The same: ", { class: "soft" });
  command.append(element("code", answer.command));
  made.append(command);
  for (const chart of answer.charts) {
    const figure = element("figure");
    const place = element("div");
    const about = [chart.about + ".", ...chart.lines].join(" ");
    figure.append(element("h3", chart.title), place, element("figcaption", about));
    made.append(figure);
    drawing += 1;
    painted()
      .then(() => charts)
      .then(({ draw }) => place.isConnected && draw(chart.spec, place))
      .finally(() => {
        drawing -= 1;
        document.body.dataset.drawn = String(drawing === 0);
      });
  }
  return made;
}

function fail(answer) {
  status_.className = "bad";
  status_.textContent = answer.error + (answer.hint ? ` (${answer.hint})` : "");
  copying.hidden = true;
}

function show(of, answer) {
  if (answer.error) return fail(answer);
  document.body.dataset.drawn = "false";
  const made = section(answer);
  const before = answers.querySelector(`[data-kind=${of}]`);
  if (before) before.replaceWith(made);
  else answers.append(made);
  if (of !== "memory") return;
  shown = answer;
  status_.className = "";
  status_.textContent = answer.verdict
    ? `With the policy chosen, it ${answer.verdict}.`
    : "Name a device to see whether it fits, and how long a step takes.";
  document.getElementById("emitted").replaceChildren(
    ...Object.keys(answer.emitted).map((name) => element("button", `copy ${name} flags`, { type: "button", "data-copy": name })),
  );
  copying.hidden = false;
}

copying.addEventListener("click", async ({ target }) => {
  const what = target.dataset?.copy;
  if (!what || !shown) return;
  const texts = { link: location.href, command: shown.command, json: shown.json, ...shown.emitted };
  const before = target.textContent;
  try {
    await navigator.clipboard.writeText(texts[what]);
    target.textContent = "copied";
  } catch {
    target.textContent = "this browser does not let pages copy";
  }
  setTimeout(() => (target.textContent = before), 1500);
});

async function take(file) {
  if (!file) return;
  config = await file.text();
  document.getElementById("dropped").hidden = false;
  ask();
}
document.getElementById("file").addEventListener("change", ({ target }) => take(target.files[0]));
document.getElementById("forget").addEventListener("click", () => {
  config = null;
  document.getElementById("file").value = "";
  document.getElementById("dropped").hidden = true;
  ask();
});
const drop = document.getElementById("drop");
addEventListener("dragover", (event) => {
  event.preventDefault();
  drop.classList.add("over");
});
addEventListener("dragleave", () => drop.classList.remove("over"));
addEventListener("drop", (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  take(event.dataTransfer.files[0]);
});

form.addEventListener("input", ({ target }) => {
  if (target.id === "file") return;
  if (target.tagName === "SELECT" || target.type === "checkbox") ask();
  else soon();
});
form.addEventListener("submit", (event) => event.preventDefault());
addEventListener("hashchange", () => {
  form.reset();
  recall();
  ask();
});

// Charts are drawn for a telephone or for a page: where one becomes the other, they are drawn anew.
matchMedia("(max-width: 730px)").addEventListener("change", ask);

function offer(choices) {
  const list = (id, options) => document.getElementById(id).replaceChildren(...options);
  list("models", choices.models.map((name) => element("option", undefined, { value: name })));
  list("devices", choices.devices.map((name) => element("option", undefined, { value: name })));
  for (const [name, words] of Object.entries(choices.words)) {
    const field = form.elements.namedItem(name);
    const first = element("option", "default");
    first.value = "";
    field.replaceChildren(first, ...words.map((word) => element("option", String(word))));
  }
  document.getElementById("version").textContent = `actcalc ${choices.version}.`;
}

worker.onmessage = ({ data }) => {
  if (data.kind === "ready") {
    offer(data.choices);
    recall();
    ask();
  } else if (data.kind === "failed") {
    status_.className = "bad";
    status_.textContent = `Python did not start: ${data.text}`;
  } else {
    computing = false;
    if (data.id === asked) took(data);
    next();
  }
};

function took({ id, of, answer, spent }) {
  const last = of === "compare" || answer.error;
  if (answer.error) open = [];
  show(of, answer);
  document.body.dataset.spent = `${of === "memory" ? "" : document.body.dataset.spent + " + "}${spent.toFixed(2)}`;
  if (last) {
    document.body.classList.remove("busy");
    document.body.dataset.answered = String(id);
  } else document.body.dataset.first = String(id);
}
