"use strict";
// Draws what the page holds: `page-data` has tables of numbers, specifications of charts, and the completions.
const page = JSON.parse(document.getElementById("page-data").textContent);
const views = new Map(); // of each chart that is drawn its Vega view, by id
window.grpoReport = { page, views };
const dark = matchMedia("(prefers-color-scheme: dark)");
const say = (text) => { document.getElementById("said").textContent = text; };
const element = (name, text = "", attributes = {}) => {
  const made = Object.assign(document.createElement(name), attributes);
  made.textContent = text;
  return made;
};

// -- charts -----------------------------------------------------------------------------------------------------------

function theme() {
  const [ink, soft, line] = dark.matches ? ["#e4e8ec", "#9aa6b2", "#2d353d"] : ["#1c2329", "#5a6570", "#e6e9ed"];
  const font = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif";
  return {
    background: null, font, padding: { left: 0, right: 6, top: 6, bottom: 0 }, view: { stroke: null },
    axis: { labelColor: soft, titleColor: ink, gridColor: line, domainColor: line, tickColor: line, labelFontSize: 11, tickSize: 4 },
    axisY: { minExtent: 34, domain: false, ticks: false }, axisX: { grid: false }, mark: { invalid: "filter" }, rule: { color: ink },
  };
}

function format(value, unit) {
  if (value === null || value === undefined) return "–";
  if (unit.startsWith("share")) return `${(100 * value).toFixed(1)} %`;
  if (Math.abs(value) >= 1e6) return Number(value.toPrecision(4)).toLocaleString("en");
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(4)));
}

function rowsOf(chart) {
  const table = page.tables[chart.table], fields = Object.entries(chart.fields);
  return table.step.map((_, row) => Object.fromEntries(fields.map(([name, column]) => [name, table[column][row]])));
}

async function draw(figure) {
  const id = figure.dataset.chart, chart = page.charts[id], plot = figure.querySelector(".plot");
  const description = plot.getAttribute("aria-label"); // or Vega writes one of its own over it
  const spec = { ...chart.spec, description, datasets: { rows: rowsOf(chart), one: [{}] } };
  const drawn = await vegaEmbed(plot, spec, { mode: "vega-lite", actions: false, renderer: "svg", config: theme(), tooltip: false });
  plot.setAttribute("role", "img");
  plot.querySelector("svg").setAttribute("aria-hidden", "true");
  views.set(id, drawn.view);
}

const steps = (chart) => page.tables[chart.table].step;

function nearest(values, wanted, usable = () => true) {
  let best = -1;
  values.forEach((value, index) => {
    if (usable(index) && (best < 0 || Math.abs(value - wanted) < Math.abs(values[best] - wanted))) best = index;
  });
  return best;
}

// A step that the reader points at is shown in every chart of the tab.
let pending = null;
function pointAt(step) {
  if (pending === null) requestAnimationFrame(() => { const at = pending.step; pending = null; showStep(at); });
  pending = { step };
}

function showStep(step) {
  for (const figure of document.querySelectorAll("section:not([hidden]) [data-chart]")) {
    const chart = page.charts[figure.dataset.chart], view = views.get(figure.dataset.chart);
    if (!view) continue;
    view.signal("at", step).runAsync();
    const outputs = figure.querySelectorAll(".legend output"), table = page.tables[chart.table];
    let shown = null;
    chart.lines.forEach((line, number) => {
      const row = step === null ? -1 : nearest(table.step, step, (index) => table[line.column][index] !== null);
      outputs[number].textContent = row < 0 ? "" : format(table[line.column][row], chart.unit);
      if (row >= 0) shown = table.step[row];
    });
    figure.querySelector(".at").textContent = shown === null ? "" : `step ${shown.toLocaleString("en")}`;
  }
}

function readAloud(figure) {
  const words = [...figure.querySelectorAll(".legend li:not(.note)")].map((item) => item.textContent.trim());
  say(`${figure.querySelector(".at").textContent}: ${words.join(", ")}`);
}

function listen(figure) {
  const plot = figure.querySelector(".plot"), id = figure.dataset.chart, chart = page.charts[id];
  plot.addEventListener("pointermove", (event) => {
    const view = views.get(id);
    if (!view) return;
    const step = view.scale("x").invert(event.clientX - plot.getBoundingClientRect().left - view.origin()[0]);
    pointAt(steps(chart)[nearest(steps(chart), step)] ?? null);
  });
  plot.addEventListener("pointerleave", () => pointAt(null));
  let row = -1;
  plot.addEventListener("keydown", (event) => {
    const last = steps(chart).length - 1, jump = event.shiftKey ? 10 : 1;
    const wanted = { ArrowLeft: (row < 0 ? last + 1 : row) - jump, ArrowRight: row + jump, Home: 0, End: last, Escape: -1 }[event.key];
    if (wanted === undefined) return;
    event.preventDefault();
    row = event.key === "Escape" ? -1 : Math.min(last, Math.max(0, wanted));
    showStep(row < 0 ? null : steps(chart)[row]);
    if (row >= 0) readAloud(figure);
  });
  figure.querySelector(".numbers").addEventListener("toggle", (event) => {
    if (event.target.open && !event.target.querySelector("table")) event.target.append(numbersOf(chart));
  });
}

function numbersOf(chart) {
  const table = page.tables[chart.table], made = element("table"), last = table.step.length - 1;
  const head = made.createTHead().insertRow();
  for (const label of ["step", ...chart.lines.map((line) => line.label)]) head.append(element("th", label, { scope: "col" }));
  const count = Math.min(12, last + 1), body = made.createTBody();
  for (let row = 0; row < count; row++) {
    const index = count > 1 ? Math.round((row * last) / (count - 1)) : 0, line = body.insertRow();
    line.append(element("th", table.step[index].toLocaleString("en"), { scope: "row" }));
    for (const { column } of chart.lines) line.append(element("td", format(table[column][index], chart.unit)));
  }
  return made;
}

// -- the timeline -----------------------------------------------------------------------------------------------------

const lanes = page.lanes;
const wholeRun = lanes && [1000 * lanes.began, 1000 * (lanes.began + lanes.ended_s)];
let range = null, dragging = false;

function laneRows(table, until = Infinity) {
  const rows = [];
  for (let index = 0; index < table.x0.length; index++) {
    if (table.x0[index] >= until) continue;
    const begin = table.x0[index], end = Math.min(table.x1[index], until), phase = table.phase[index];
    rows.push({
      x0: 1000 * (lanes.began + begin), x1: 1000 * (lanes.began + end), y0: table.y0[index], y1: table.y1[index],
      phase: lanes.colours[phase], what: lanes.phases[phase], lane: lanes.labels[Math.floor(table.y0[index])],
      step: table.step ? table.step[index] : "several",
      seconds: table.step ? (end - begin).toFixed(2) : ((end - begin) * (table.y1[index] - table.y0[index]) / 0.88).toFixed(1),
    });
  }
  return rows;
}

async function drawLanes() {
  if (!lanes) return;
  const options = { mode: "vega-lite", actions: false, renderer: "canvas", config: theme() };
  const withRange = (spec, from, to) => ({
    ...spec,
    params: spec.params.map((each) => ({ ...each, ...({ labels: { value: lanes.labels }, from: { value: from }, to: { value: to } }[each.name]) })),
  });
  range = range ?? RANGES.last();
  const labelled = (id) => ({ description: document.getElementById(id).getAttribute("aria-label") });
  const coarse = { ...labelled("whole-run"), ...withRange(lanes.overview_spec, ...wholeRun), datasets: { rows: laneRows(lanes.overview) } };
  const before = laneRows(lanes.overview, lanes.detail_from_s);
  const fine = { ...labelled("detail"), ...withRange(lanes.detail_spec, ...range), datasets: { rows: [...before, ...laneRows(lanes.detail)] } };
  views.set("whole-run", (await vegaEmbed("#whole-run", coarse, options)).view);
  views.set("detail", (await vegaEmbed("#detail", fine, options)).view);
  views.get("whole-run").addSignalListener("brush_x", (_, [begin, end]) => {
    if (!dragging) return; // a resize moves the brush as well, and so do we
    const x = views.get("whole-run").scale("x");
    showRange(begin === end ? wholeRun : [x.invert(Math.min(begin, end)), x.invert(Math.max(begin, end))].map(Number), false);
  });
  showRange(range, true);
}

function showRange([from, to], moveBrush) {
  const [first, last] = wholeRun, length = Math.min(Math.max(to - from, 1000), last - first);
  from = Math.min(Math.max(from, first), last - length);
  range = [from, from + length];
  views.get("detail").signal("from", range[0]).signal("to", range[1]).runAsync();
  if (moveBrush) {
    const overview = views.get("whole-run");
    overview.signal("brush_x", range.map(overview.scale("x"))).runAsync();
  }
  const clock = (at) => new Date(at).toISOString().slice(5, 19).replace("T", " ");
  document.getElementById("range").textContent = `${clock(range[0])} to ${clock(range[1])}`;
}

const RANGES = {
  last: () => [1000 * (lanes.began + lanes.first_shown_s), wholeRun[1]],
  all: () => wholeRun,
  earlier: ([from, to]) => [from - (to - from) / 2, to - (to - from) / 2],
  later: ([from, to]) => [from + (to - from) / 2, to + (to - from) / 2],
  in: ([from, to]) => [from + (to - from) / 4, to - (to - from) / 4],
  out: ([from, to]) => [from - (to - from) / 2, to + (to - from) / 2],
};
if (lanes) {
  const overview = document.getElementById("whole-run"), redraw = () => { if (views.has("whole-run")) showRange(range, true); };
  overview.addEventListener("pointerdown", () => { dragging = true; }, { capture: true });
  addEventListener("pointerup", () => setTimeout(() => { dragging = false; }, 50));
  addEventListener("pointercancel", () => { dragging = false; });
  addEventListener("resize", () => setTimeout(redraw, 50)); // after Vega has taken the new width
}
for (const button of document.querySelectorAll("[data-range]"))
  button.addEventListener("click", () => showRange(RANGES[button.dataset.range](range), true));

// -- tabs -------------------------------------------------------------------------------------------------------------

const tabs = [...document.querySelectorAll("[role=tab]")];
const drawnTabs = new Set();

async function open(tab, focus = false) {
  for (const each of tabs) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", chosen);
    each.tabIndex = chosen ? 0 : -1;
    document.getElementById(each.getAttribute("aria-controls")).hidden = !chosen;
  }
  if (focus) tab.focus();
  const id = tab.getAttribute("aria-controls");
  if (drawnTabs.has(id)) return;
  drawnTabs.add(id);
  if (id === "time") await drawLanes();
  for (const figure of document.querySelectorAll(`#${id} [data-chart]`)) await draw(figure);
  document.getElementById(id).dataset.drawn = "true";
}

for (const tab of tabs) {
  const id = tab.getAttribute("aria-controls");
  tab.addEventListener("click", () => { history.replaceState(null, "", `#${id}`); open(tab); });
  tab.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = { Home: tabs[0], End: tabs.at(-1) }[event.key] ?? (by && tabs[(tabs.indexOf(tab) + by + tabs.length) % tabs.length]);
    if (!next) return;
    event.preventDefault();
    history.replaceState(null, "", `#${next.getAttribute("aria-controls")}`);
    open(next, true);
  });
}

// -- completions ------------------------------------------------------------------------------------------------------

const browser = page.completions;
const shorten = (text, most) => { const line = text.replace(/\s+/g, " ").trim(); return line.length > most ? `${line.slice(0, most)}…` : line; };
const STOP = 8; // of a sample: its finish reason
let found = []; // prompts with the samples that pass the filters, and no others
const chosenPrompt = () => found[document.getElementById("prompt").value];

function filtered() {
  const [text, least, most, reason] = ["text", "least", "most", "reason"].map((id) => document.getElementById(id).value);
  const has = (where) => where.toLowerCase().includes(text.toLowerCase());
  const passes = (sample, prompt) => (has(sample[0]) || has(prompt.text)) && (least === "" || sample[1] >= least)
    && (most === "" || sample[1] <= most) && (reason === "" || sample[STOP] === reason);
  return browser.prompts.map((prompt) => ({
    ...prompt,
    groups: prompt.groups.map((group) => ({ ...group, samples: group.samples.filter((sample) => passes(sample, prompt)) }))
      .filter((group) => group.samples.length),
  })).filter((prompt) => prompt.groups.length);
}

function card(sample, step, body, rewards) {
  const [, reward, parts, advantage, node, engine, version, tokens, stop] = sample;
  const made = element("div", "", { className: "sample" }), head = element("div");
  const span = Math.max(...rewards) - Math.min(...rewards), share = span ? (reward - Math.min(...rewards)) / span : 0.5;
  head.style.setProperty("--c", `hsl(${Math.round(8 + 130 * share)} 55% 48%)`);
  const tell = (name, value) => { if (value !== null && value !== undefined) { const item = element("span", `${name} `); item.append(element("b", format2(value))); head.append(item); } };
  if (step !== null) tell("step", step);
  tell("reward", reward);
  browser.functions.forEach((name, number) => tell(name, parts[number]));
  tell("advantage", advantage);
  tell("tokens", tokens);
  tell("finish reason", stop);
  tell("policy", version);
  if (node !== null) tell("sampled on", `node ${node}, engine ${engine ?? "?"}`);
  made.append(head, body);
  return made;
}

const format2 = (value) => (typeof value === "number" ? String(Number(value.toPrecision(4))) : value);
const whole = (text) => element("pre", text, { tabIndex: 0 });

// The longest common subsequence of words; of very long texts only the first words are compared.
function changed(before, after) {
  const MOST = 1500, split = (text) => text.match(/\s+|[\p{L}\p{N}_]+|[^\s\p{L}\p{N}_]/gu) ?? [];
  const all = split(after), a = split(before).slice(0, MOST), b = all.slice(0, MOST), width = b.length + 1;
  const length = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      length[i * width + j] = a[i] === b[j] ? length[(i + 1) * width + j + 1] + 1 : Math.max(length[(i + 1) * width + j], length[i * width + j + 1]);
  const made = whole("");
  const add = (name, word) => {
    if (made.lastChild?.nodeName === name.toUpperCase()) made.lastChild.textContent += word;
    else made.append(element(name, word));
  };
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { add("span", b[j]); i++; j++; }
    else if (j >= b.length || (i < a.length && length[(i + 1) * width + j] >= length[i * width + j + 1])) add("del", a[i++]);
    else add("ins", b[j++]);
  }
  for (const word of all.slice(MOST)) add("span", word);
  return made;
}

function showCompletions() {
  if (!found.length) {
    document.getElementById("samples-title").textContent = "No sample is like that";
    document.getElementById("prompt-text").textContent = "";
    document.getElementById("samples").replaceChildren();
    return;
  }
  const prompt = chosenPrompt(), slider = document.getElementById("step"), mode = document.querySelector("[name=view]:checked").value;
  const samples = document.getElementById("samples"), last = prompt.groups.length - 1;
  const rewards = prompt.groups.flatMap((group) => group.samples.map((sample) => sample[1] ?? 0));
  document.getElementById("prompt-text").textContent = prompt.text;
  slider.max = last;
  slider.disabled = last === 0;
  document.getElementById("step-label").hidden = mode !== "samples";
  document.getElementById("marks").hidden = mode === "samples";
  const group = prompt.groups[Math.min(slider.value, last)];
  if (mode === "samples") {
    document.getElementById("step-shown").textContent = `${group.step.toLocaleString("en")} (${Math.min(slider.value, last) + 1} of ${last + 1})`;
    slider.setAttribute("aria-valuetext", `step ${group.step}`);
    document.getElementById("samples-title").textContent = `${group.samples.length} samples at step ${group.step}, the best first`;
    samples.replaceChildren(...group.samples.map((sample) => card(sample, null, whole(sample[0]), rewards)));
    return;
  }
  const pick = (each) => each.samples.at(mode === "best" ? 0 : -1);
  document.getElementById("samples-title").textContent = `The ${mode} sample at ${last + 1} steps, the newest first`;
  samples.replaceChildren(...prompt.groups.map((each, index) => {
    const text = pick(each)[0], body = index ? changed(pick(prompt.groups[index - 1])[0], text) : whole(text);
    return card(pick(each), each.step, body, rewards);
  }).reverse());
}

if (browser) {
  const list = document.getElementById("prompt"), slider = document.getElementById("step");
  const samplesOf = (prompts) => prompts.flatMap((prompt) => prompt.groups.flatMap((group) => group.samples));
  const all = samplesOf(browser.prompts).length;
  for (const reason of new Set(samplesOf(browser.prompts).map((sample) => sample[STOP]).filter(Boolean)))
    document.getElementById("reason").append(element("option", reason, { value: reason }));
  const newest = () => { slider.max = (chosenPrompt()?.groups.length ?? 1) - 1; slider.value = slider.max; showCompletions(); };
  const find = () => {
    found = filtered();
    list.replaceChildren(...found.map((prompt, index) => {
      const times = prompt.groups.length;
      return element("option", `${prompt.set && `${prompt.set}: `}${shorten(prompt.text, 70)} (${times} step${times > 1 ? "s" : ""})`, { value: index });
    }));
    document.getElementById("found").textContent = `${samplesOf(found).length} of ${all} samples`;
    newest();
  };
  document.getElementById("filters").addEventListener("input", find);
  list.addEventListener("change", newest);
  slider.addEventListener("input", showCompletions);
  for (const each of document.querySelectorAll("[name=view]")) each.addEventListener("change", showCompletions);
  find();
}

// -- begin ------------------------------------------------------------------------------------------------------------

document.querySelectorAll("[data-chart]").forEach(listen);
const named = () => tabs.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash);
dark.addEventListener("change", async () => {
  for (const view of views.values()) view.finalize();
  views.clear();
  drawnTabs.clear();
  await open(tabs.find((tab) => tab.getAttribute("aria-selected") === "true"));
});
addEventListener("hashchange", () => { if (named()) open(named()); });
open(named() ?? tabs[0]);
