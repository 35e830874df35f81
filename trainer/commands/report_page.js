"use strict";
// Draws the page from the JSON in #data. Texts become text nodes, never HTML; Plotly, which reads some tags in its
// labels, gets them escaped.
const BLUE = "#3b6fb6", ORANGE = "#e08a2b", GREEN = "#3f9d6b", RED = "#c8504b", PALE = "#b9cde8";
const PANELS = [
  ["reward", [["reward/mean", "training", BLUE], ["eval/accuracy", "held-out accuracy", GREEN], ["eval/reward", "held-out reward", PALE]]],
  ["loss, nats per token", [["loss", "training", BLUE], ["eval/loss", "held-out", GREEN]]],
  ["log-probability gap, trainer to engine, nats", [["gap/max", "max", RED], ["gap/p95", "95th percentile", ORANGE], ["gap/mean", "mean", BLUE]], "log"],
  ["response length, tokens", [["length/mean", "mean", BLUE], ["length/max", "max", PALE]]],
  ["share of answers cut off", [["length/truncated", "cut off", RED]]],
  ["entropy, nats per token", [["entropy", "entropy", BLUE]]],
  ["KL to the reference", [["kl", "KL", ORANGE]]],
  ["gradient norm", [["grad_norm", "gradient norm", BLUE]]],
  ["learning rate", [["lr", "learning rate", ORANGE]], "from 0"],
  ["tokens per second", [["throughput/rollout_tokens_per_s", "rollout", BLUE], ["throughput/train_tokens_per_s", "update", ORANGE]]],
];
const FROM_0 = {rangemode: "tozero", exponentformat: "e"};
const PLOT_HEIGHT = 240, LEGEND_ROW = 19, LEGEND_ENTRY = 150; // px, without the legend; of its rows; of an entry
const byId = (id) => document.getElementById(id);
const label = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
let data = JSON.parse(byId("data").textContent), steps = [];

function make(tag, text, kind) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (kind) element.className = kind;
  return element;
}

// A number with four digits, as people write it: 0.8182, not 0.8181818181818182.
function rounded(value) {
  return typeof value === "number" ? String(Number(value.toPrecision(4))) : value;
}

function table(id, titles, lines) {
  const head = make("tr");
  titles.forEach((title) => head.append(make("th", title)));
  const rows = lines.map((line) => {
    const row = make("tr");
    line.forEach((cell) => row.append(make("td", cell)));
    return row;
  });
  byId(id).replaceChildren(...(rows.length ? [head, ...rows] : []));
}

// Draws curves below the heading beside `element`. The legend is below the axis, in height that is added for it, so that
// it covers neither the heading nor the curves.
function plot(element, title, traces, yaxis, extra) {
  element.parentElement.querySelector("h3").textContent = title;
  const style = getComputedStyle(document.documentElement), color = (name) => style.getPropertyValue(name).trim();
  const perRow = Math.max(1, Math.floor((element.clientWidth - 70) / LEGEND_ENTRY));
  const height = PLOT_HEIGHT + LEGEND_ROW * Math.ceil(traces.length / perRow);
  element.style.height = `${height}px`;
  const axis = {gridcolor: color("--grid"), zerolinecolor: color("--grid"), automargin: true};
  const layout = {
    height, margin: {l: 55, r: 15, t: 28, b: 40}, hovermode: "x unified", uirevision: "kept",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: {color: color("--ink"), size: 12},
    modebar: {bgcolor: "rgba(0,0,0,0)", color: color("--note"), activecolor: color("--ink")},
    hoverlabel: {bgcolor: color("--card"), font: {color: color("--ink")}},
    legend: {orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, entrywidth: LEGEND_ENTRY - 40, font: {size: 11}},
    xaxis: {title: {text: "step", standoff: 4}, ...axis}, yaxis: {...axis, ...yaxis}, ...extra,
  };
  // A page of a run sends nothing anywhere, though Plotly's bar has a button for it.
  Plotly.react(element, traces, layout, {displaylogo: false, responsive: true, modeBarButtonsToRemove: ["sendChartToCloud"]});
}

function line(curve, name, color, more) {
  const few = curve[0].length < 40;
  return {x: curve[0], y: curve[1], name: label(name), mode: few ? "lines+markers" : "lines", line: {color, width: 2}, marker: {size: 5}, ...more};
}

function drawCurves() {
  const own = data.runs[0].curves;
  const present = PANELS.map(([title, keys, scale]) => [title, keys.filter(([key]) => own[key] && own[key][0].length), scale])
    .filter(([title, keys]) => keys.length && !(title.startsWith("loss") && own["reward/mean"]));
  const box = byId("panels");
  while (box.childElementCount < present.length) {
    const panel = make("div");
    panel.append(make("h3"), make("div", undefined, "plot"));
    box.append(panel);
  }
  present.forEach(([title, keys, scale], place) => {
    const traces = keys.map(([key, name, color]) => line(own[key], name, color));
    const positive = keys.some(([key]) => own[key][1].some((value) => value > 0));
    const logarithmic = scale === "log" && positive ? {type: "log", exponentformat: "power", dtick: 1} : {};
    plot(box.children[place].querySelector(".plot"), title, traces, scale === "from 0" ? FROM_0 : logarithmic);
  });
  const parts = Object.keys(own).filter((key) => key.startsWith("time/") && key !== "time/step" && own[key][0].length);
  plot(byId("seconds"), "seconds of a step, by phase", parts.map((key) => line(own[key], key.slice(5), undefined, {stackgroup: "one", line: {width: 0.5}, mode: "lines"})));
  const sizes = Object.keys(own).filter((key) => key.startsWith("memory/") && key.includes("_gib") && own[key][0].length);
  plot(byId("gib"), "memory, GiB", sizes.map((key) => line(own[key], key.slice(7).replace("_gib", "").replaceAll("_", " "))), FROM_0);
}

function drawComparison() {
  const select = byId("figure"), chosen = select.value;
  const keys = [...new Set(data.runs.flatMap((run) => Object.keys(run.curves)))].filter((key) => data.runs.some((run) => run.curves[key]?.[0].length)).sort();
  select.replaceChildren(...keys.map((key) => { const option = make("option", key); option.value = key; return option; }));
  const first = ["eval/accuracy", "reward/mean", "loss"].find((key) => keys.includes(key)) ?? keys[0];
  select.value = keys.includes(chosen) ? chosen : first;
  const key = select.value;
  plot(byId("comparison"), key, data.runs.filter((run) => run.curves[key]?.[0].length).map((run) => line(run.curves[key], run.name)), {}, {showlegend: true});
}

function colour(name, value, largest) {
  const strength = largest ? Math.min(1, Math.abs(value) / largest) : 0;
  const tone = name === "entropy" ? "224,138,43" : value < 0 ? "200,80,75" : "59,111,182";
  return `rgba(${tone},${(0.75 * strength).toFixed(3)})`;
}

function tokenCards(step) {
  const name = byId("colour").value, rows = data.tokens.filter((row) => row["train/step"] === step);
  const sizes = rows.flatMap((row) => row[name].filter((value) => value !== null).map(Math.abs)).sort((a, b) => a - b);
  const largest = sizes.length ? sizes[Math.floor(0.99 * (sizes.length - 1))] : 0;
  const sides = {gap: "blue: the trainer finds the token likelier than the engine did, red: less likely", entropy: "the darker, the more undecided", advantage: "blue: above expectation, red: below"};
  byId("legend").textContent = rows.length ? `${sides[name]}; darkest at ${largest.toPrecision(2)}. Point at a token for its figures; grey ones were not trained.` : "no tokens of this step were kept (tracking.tokens_per_step), or nothing was trained in it";
  byId("tokens").replaceChildren(...rows.map((row) => {
    const card = make("div", undefined, "card"), text = make("div", undefined, "tokens");
    card.append(make("div", `prompt ${row.prompt_id}, sample ${row.sample}, reward ${rounded(row.reward ?? "none")}: its tokens`, "note"), text);
    row.tokens.forEach((token, place) => {
      const span = make("span", token.replaceAll("\n", "↵\n"));
      if (row.gap[place] === null) span.className = "theirs";
      else {
        span.style.backgroundColor = colour(name, row[name][place], largest);
        span.title = ["gap", "entropy", "advantage"].map((key) => `${key} ${row[key][place]}`).join("\n");
      }
      text.append(span);
    });
    return card;
  }));
}

function answerCard(row) {
  const card = make("div", undefined, "card"), parts = Object.entries(row.parts ?? {}).map(([key, value]) => `${key} ${rounded(value)}`);
  const facts = [`reward ${rounded(row.reward ?? "none")}`, ...parts, row.finish_reason && `end: ${row.finish_reason}`, row.tokens !== undefined && `${row.tokens} tokens`, row.weight_version !== undefined && `weights ${row.weight_version}`];
  card.append(make("div", facts.filter(Boolean).join(" · "), "note"));
  if (row.answer !== null && row.answer !== undefined) card.append(make("div", `expected: ${row.answer}`, "note"));
  if (row.error) card.append(make("div", row.error, "error"));
  card.append(make("pre", row.prompt ?? "", "prompt"));
  (row.images ?? []).forEach((source) => Object.assign(card.appendChild(make("img")), {src: source, alt: "what was shown"}));
  const text = make("pre");
  (row.pieces ?? [[row.text ?? "", true]]).forEach(([piece, own]) => text.append(make("span", piece, own ? "" : "theirs")));
  card.append(text);
  return card;
}

function drawStep(step) {
  byId("step").value = step;
  byId("slide").value = steps.indexOf(step);
  const rows = data.answers.filter((row) => row["train/step"] === step);
  tokenCards(step);
  byId("texts").replaceChildren(...rows.map(answerCard));
}

function nearest(step) {
  return steps.reduce((best, each) => (Math.abs(each - step) < Math.abs(best - step) ? each : best), steps[0]);
}

function drawAnswers() {
  const before = Number(byId("step").value), latest = steps.length && before === steps[steps.length - 1];
  steps = [...new Set([...data.answers, ...data.tokens].map((row) => row["train/step"]))].sort((a, b) => a - b);
  byId("slide").max = Math.max(0, steps.length - 1);
  byId("steps").textContent = steps.length ? `of ${steps.length} steps from ${steps[0]} to ${steps[steps.length - 1]}` : "no answers are kept";
  if (steps.length) drawStep(byId("step").value === "" || latest ? steps[steps.length - 1] : nearest(before));
}

function drawRecipe() {
  const shown = data.recipe.filter(([, , , changed]) => changed || byId("all").checked);
  table("keys", ["key", "here", "default"], shown.map(([key, value, usual, changed]) => [key, value, changed ? usual : ""]));
  [...byId("keys").rows].slice(1).forEach((row, place) => { if (shown[place][3]) row.className = "changed"; });
}

function draw() {
  byId("name").textContent = data.name;
  byId("state").textContent = data.state;
  byId("remarks").replaceChildren(...data.remarks.map((remark) => make("li", remark)));
  table("figures", ["", "first", "best", "last"], data.figures);
  table("phases", ["phase", "total", "share", "median", "longest"], data.phases);
  table("memory", ["largest, GiB", ""], data.memory);
  drawCurves();
  drawComparison();
  drawAnswers();
  drawRecipe();
}

byId("step").addEventListener("change", (event) => steps.length && drawStep(nearest(Number(event.target.value))));
byId("slide").addEventListener("input", (event) => steps.length && drawStep(steps[Number(event.target.value)]));
byId("colour").addEventListener("change", () => tokenCards(Number(byId("step").value)));
byId("figure").addEventListener("change", drawComparison);
byId("all").addEventListener("change", drawRecipe);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();

async function follow(seen) {
  try {
    const answer = await fetch("data", {headers: seen ? {"If-None-Match": seen} : {}, cache: "no-store"});
    if (answer.status === 200) {
      data = await answer.json();
      seen = answer.headers.get("ETag");
      draw();
    }
  } catch { /* the command has been stopped: the page stays as it is */ }
  setTimeout(follow, 3000, seen);
}
if (data.follows) follow("");
