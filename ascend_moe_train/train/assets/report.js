"use strict";
/* Curves. Everything that comes from the run is put into the page as text, never as markup. */

const run = JSON.parse(document.getElementById("run-data").textContent);

const PERCENT = (v) => `${trim(v * 100)} %`;
const SCALED = (v) => {
  for (const [size, unit] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
    if (Math.abs(v) >= size) return `${trim(v / size)} ${unit}`;
  return trim(v);
};
const PLAIN = (v) => (v !== 0 && (Math.abs(v) < 1e-2 || Math.abs(v) >= 1e6) ? v.toExponential(2).replace(/\.?0+e/, "e") : trim(v));

function trim(v) {
  return String(Number(v.toPrecision(4)));
}

const RANGE = "lowest to highest layer";
const CHARTS = [
  {
    title: "Loss", unit: "nats per token", size: "wide", height: 320, format: PLAIN, log: Infinity, skipped: true,
    lines: [["loss", "training", "raw"], ["loss_smooth", "smoothed", "main"], ["eval_loss", "validation", "second"]],
  },
  { title: "Bits per byte", unit: "validation", size: "half", format: PLAIN, log: Infinity, lines: [["eval_bits_per_byte", "bits per byte", "second"]] },
  { title: "Perplexity", unit: "validation", size: "half", format: PLAIN, log: 20, lines: [["eval_perplexity", "perplexity", "second"]] },
  { title: "Learning rate", format: PLAIN, zero: true, lines: [["lr", "learning rate", "main"]] },
  { title: "Gradient norm", unit: "before clipping", format: PLAIN, zero: true, log: 50, lines: [["grad_norm", "gradient norm", "main"]] },
  { title: "Loss scale", format: SCALED, log: 4, lines: [["loss_scale", "loss scale", "main"]] },
  { title: "Throughput", unit: "tokens/s", format: SCALED, zero: true, lines: [["tokens_per_s", "tokens/s", "main"]] },
  { title: "Memory", unit: "resident bytes", format: SCALED, zero: true, lines: [["memory_bytes", "bytes", "main"]] },
  {
    title: "Communication", unit: "seconds a step, first rank", format: PLAIN, zero: true,
    lines: [["comm_s", "all", "main"], ["comm_exposed_s", "waited for", "second"]],
  },
  { title: "Sent", unit: "payload bytes a step, first rank", format: SCALED, zero: true, lines: [["comm_bytes", "bytes", "main"]] },
  { title: "Load variation", unit: "deviation / mean", format: PLAIN, zero: true, range: RANGE, lines: [["load_cv", "mean of layers", "main"]] },
  { title: "Busiest expert", unit: "load / mean", format: PLAIN, range: RANGE, lines: [["load_max_over_mean", "mean of layers", "main"]] },
  { title: "Dead experts", unit: "per layer", format: PLAIN, zero: true, range: RANGE, lines: [["dead_experts", "mean of layers", "main"]] },
  { title: "Dropped assignments", format: PERCENT, zero: true, lines: [["drop_rate", "dropped", "main"]] },
  {
    title: "Router losses", unit: "without their coefficients", format: PLAIN, zero: true,
    lines: [["aux_loss", "load balance", "main"], ["z_loss", "z", "second"]],
  },
];

const charts = [];

function node(name, attributes = {}, text) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function shape(parent, name, attributes, text) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function quantile(sorted, share) {
  return sorted[Math.round((sorted.length - 1) * share)];
}

/* The range of a chart's values; the noisy training curve may leave it by its most extreme hundredth. */
function domain(chart) {
  let low = Infinity, high = -Infinity;
  for (const line of chart.lines) {
    const usable = (v) => v !== null && (!chart.isLog || v > 0);
    const edges = chart.range ? [line.low || line.value, line.high || line.value] : [line.value, line.value];
    const lows = edges[0].filter(usable).sort((a, b) => a - b);
    const highs = edges[1].filter(usable).sort((a, b) => a - b);
    if (!lows.length) continue;
    const cut = line.style === "raw" && lows.length > 50 ? 0.01 : 0;
    low = Math.min(low, quantile(lows, cut));
    high = Math.max(high, quantile(highs, 1 - cut));
  }
  if (low > high) return [0, 1];
  if (chart.isLog) return low === high ? [low / 2, high * 2] : [low / 1.1, high * 1.1];
  if (chart.zero) low = Math.min(low, 0);
  if (chart.zero && high === 0) return [0, 1];
  if (low === high) return [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
  const pad = (high - low) * 0.05;
  return [chart.zero && low === 0 ? 0 : low - pad, high + pad];
}

function ticks(low, high, count) {
  const raw = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 5, 10].find((step) => step * power >= raw) * power;
  const out = [];
  for (let k = Math.ceil(low / unit); k * unit <= high + unit * 1e-9; k++) out.push(k * unit);
  return out;
}

function logTicks(low, high) {
  const out = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++)
    for (const step of high / low < 30 ? [1, 2, 5] : [1])
      if (step * 10 ** power >= low && step * 10 ** power <= high) out.push(step * 10 ** power);
  const every = Math.ceil(out.length / 6);
  return out.length > 1 ? out.filter((_, k) => k % every === 0) : ticks(low, high, 4);
}

/* Stretches of a line without a gap, as [x, low, value, high]. */
function stretches(line, x, y) {
  const out = [[]];
  line.step.forEach((step, k) => {
    const at = y(line.value[k]);
    if (at === null) return out[out.length - 1].length && out.push([]);
    const band = line.low ? [y(line.low[k]) ?? at, y(line.high[k]) ?? at] : [at, at];
    out[out.length - 1].push([x(step), band[0], at, band[1]]);
  });
  return out.filter((stretch) => stretch.length);
}

function drawLine(parent, line, x, y) {
  const path = (points) => points.map(([px, py]) => `${px.toFixed(1)} ${py.toFixed(1)}`).join("L");
  for (const stretch of stretches(line, x, y)) {
    if (line.low) {
      const up = stretch.map((p) => [p[0], p[3]]), down = stretch.map((p) => [p[0], p[1]]).reverse();
      shape(parent, "path", { class: `${line.style} area`, d: `M${path(up.concat(down))}Z` });
    }
    if (stretch.length > 1) shape(parent, "path", { class: `${line.style} line`, d: `M${path(stretch.map((p) => [p[0], p[2]]))}` });
    if (stretch.length === 1 || (line.key.startsWith("eval_") && line.step.length <= 60))
      for (const p of stretch) shape(parent, "circle", { class: `${line.style} dot`, cx: p[0], cy: p[2], r: 3.5 });
  }
}

function axes(chart, width, x, y) {
  const { svg, height, format } = chart;
  const [low, high] = chart.domain;
  const marks = chart.isLog ? logTicks(low, high) : ticks(low, high, height > 250 ? 6 : 4);
  for (const value of marks) {
    shape(svg, "line", { class: "grid", x1: chart.left, x2: width, y1: y(value), y2: y(value) });
    shape(svg, "text", { x: chart.left - 8, y: y(value) + 4, "text-anchor": "end" }, format(value));
  }
  const [first, last] = chart.steps;
  const bottom = height - 22;
  shape(svg, "line", { class: "axis", x1: chart.left, x2: width, y1: bottom, y2: bottom });
  const along = first === last ? [first] : ticks(first, last, Math.max(2, width / 90)).filter(Number.isInteger);
  for (const step of along) {
    const near = width - x(step) < 16 ? "end" : "middle";
    shape(svg, "text", { x: x(step), y: height - 4, "text-anchor": near }, step >= 1e4 ? SCALED(step).replace(" ", "") : step);
  }
}

function draw(chart) {
  const { svg, height } = chart;
  const width = svg.clientWidth || 300;
  svg.replaceChildren();
  svg.setAttribute("height", height);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  chart.domain = domain(chart);
  const [low, high] = chart.domain;
  const marks = chart.isLog ? logTicks(low, high) : ticks(low, high, height > 250 ? 6 : 4);
  chart.left = Math.max(...marks.map((value) => chart.format(value).length)) * 6.6 + 12;
  const [first, last] = chart.steps;
  const level = chart.isLog ? Math.log : (v) => v;
  const x = (step) => (first === last ? (chart.left + width) / 2 : chart.left + 4 + ((step - first) / (last - first)) * (width - chart.left - 8));
  const y = (v) => (v === null || (chart.isLog && v <= 0) ? null : height - 22 - ((level(v) - level(low)) / (level(high) - level(low))) * (height - 30));
  chart.x = x;
  chart.y = y;
  axes(chart, width, x, y);
  const clip = shape(svg, "clipPath", { id: chart.id });
  shape(clip, "rect", { x: chart.left, y: 0, width: width - chart.left, height: height - 22 });
  const inside = shape(svg, "g", { "clip-path": `url(#${chart.id})` });
  for (const line of chart.lines) drawLine(inside, line, x, y);
  for (const step of chart.skipped ? run.skipped : [])
    shape(svg, "line", { class: "skip mark", x1: x(step), x2: x(step), y1: height - 34, y2: height - 22 });
  chart.hover = shape(svg, "g", {});
}

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle;
    else high = middle;
  }
  return step - steps[low] <= steps[high] - step ? low : high;
}

/* The crosshair is shared: every chart shows the step that the pointer is at, the chart under it also the values. */
function point(step, owner) {
  for (const chart of charts) {
    chart.hover.replaceChildren();
    chart.tip.hidden = chart !== owner || step === null;
    if (step === null || step < chart.steps[0] || step > chart.steps[1]) continue;
    const at = chart.x(step);
    shape(chart.hover, "line", { class: "cross", x1: at, x2: at, y1: 0, y2: chart.height - 22 });
    if (chart === owner) describe(chart, step, at);
  }
}

function describe(chart, step, at) {
  chart.tip.replaceChildren(node("b", {}, `step ${step}`));
  for (const line of chart.lines) {
    const k = nearest(line.step, step);
    const value = line.value[k];
    const row = node("div", { class: line.style });
    const away = line.step[k] === step ? "" : ` @ ${line.step[k]}`;
    row.append(node("span", {}, line.name + away), node("b", {}, value === null ? "not finite" : chart.format(value)));
    chart.tip.append(row);
    if (line.low && value !== null && line.low[k] !== line.high[k])
      chart.tip.append(node("div", { class: "unit" }, `${chart.format(line.low[k])} to ${chart.format(line.high[k])}`));
    const y = chart.y(value);
    if (y !== null && y >= 0) shape(chart.hover, "circle", { class: `${line.style} dot`, cx: chart.x(line.step[k]), cy: y, r: 4 });
  }
  if (chart.skipped && run.skipped.includes(step)) chart.tip.append(node("div", { class: "skip" }, "step skipped"));
  const room = chart.card.clientWidth - chart.tip.offsetWidth - 8;
  const left = chart.svg.offsetLeft || 16;
  const beside = at + left + 14 > room ? at + left - chart.tip.offsetWidth - 14 : at + left + 14;
  chart.tip.style.left = `${Math.max(8, Math.min(beside, room))}px`;
  chart.tip.style.top = `${chart.card.clientHeight - chart.height}px`;
}

function listen(chart) {
  const all = chart.lines.reduce((most, line) => (line.step.length > most.length ? line.step : most), []);
  let at = all.length - 1;
  chart.svg.addEventListener("pointermove", (event) => {
    const [first, last] = chart.steps;
    const width = chart.svg.clientWidth - chart.left;
    const share = (event.clientX - chart.svg.getBoundingClientRect().left - chart.left) / width;
    at = nearest(all, first + share * (last - first));
    point(all[at], chart);
  });
  chart.svg.addEventListener("pointerleave", () => point(null));
  chart.svg.addEventListener("blur", () => point(null));
  chart.svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (!move) return;
    event.preventDefault();
    at = Math.min(Math.max(at + move, 0), all.length - 1);
    point(all[at], chart);
  });
}

function legend(chart) {
  const list = node("p", { class: "legend" });
  const entry = (style, text) => {
    const item = node("span", { class: style });
    item.append(node("b", {}, text));
    list.append(item);
  };
  if (chart.lines.length > 1 || chart.range) for (const line of chart.lines) entry(line.style, line.name);
  const banded = chart.lines.find((line) => line.low);
  if (banded) entry(`${banded.style} range`, chart.range || "lowest to highest step");
  if (chart.skipped && run.skipped.length) entry("skip", "step skipped");
  return list;
}

function logButton(chart) {
  const values = chart.lines.flatMap((line) => line.value).filter((v) => v > 0);
  chart.isLog = Math.max(...values) / Math.min(...values) > chart.log;
  const button = node("button", { class: "log", type: "button", "aria-pressed": chart.isLog }, "log");
  button.addEventListener("click", () => {
    chart.isLog = !chart.isLog;
    button.setAttribute("aria-pressed", chart.isLog);
    draw(chart);
  });
  return values.length ? button : "";
}

function build(spec, index) {
  const lines = spec.lines
    .filter(([key]) => run.series[key])
    .map(([key, name, style]) => ({ key, name, style, ...run.series[key] }));
  if (!lines.length) return;
  const chart = { height: 190, ...spec, id: `clip${index}`, lines };
  const every = lines.flatMap((line) => [line.step[0], line.step[line.step.length - 1]]);
  chart.steps = [Math.min(...every), Math.max(...every)];
  chart.card = node("figure", { class: `card ${spec.size || ""}` });
  const head = node("figcaption", { class: "head" });
  head.append(node("h2", {}, spec.title), node("span", { class: "unit" }, spec.unit || ""), spec.log ? logButton(chart) : "");
  chart.svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const label = `${spec.title} over steps ${chart.steps[0]} to ${chart.steps[1]}; arrow keys read values`;
  for (const [key, value] of Object.entries({ role: "img", tabindex: "0", "aria-label": label })) chart.svg.setAttribute(key, value);
  chart.tip = node("div", { class: "tip", hidden: "", "aria-live": "polite" });
  const plot = node("div");
  plot.append(chart.svg);
  chart.card.append(head, legend(chart), plot, chart.tip);
  document.getElementById("charts").append(chart.card);
  charts.push(chart);
  draw(chart);
  listen(chart);
  new ResizeObserver(() => draw(chart)).observe(plot);
}

CHARTS.forEach(build);
