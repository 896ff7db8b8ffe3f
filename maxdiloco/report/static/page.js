"use strict";
// Reads the numbers of the page, draws each panel with uPlot and keeps their cursors together.
const DATA = JSON.parse(document.getElementById("data").textContent);
const SINGLE = DATA.runs.length === 1;
const COLOURS = 7;
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]]; // of runs beyond the colours
const FEW = 6; // replicas of one run that have a colour each; more are told apart by the cursor
const X_AXES = { "learning/tokens": "tokens", "dcn/bytes_sent_in_all": "bytes sent by a replica",
  "perf/wall_time_s": "seconds of wall time" };
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (n) => css(`--c${n % COLOURS}`);
const cycle = (run) => Math.floor(run / COLOURS);
const whole = (n) => Math.round(n).toLocaleString("en-US");

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function decode(text, Kind) {
  return new Kind(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
}

// In uPlot undefined is a row without a value, which the line passes over, and null is a gap.
const TABLES = DATA.tables.map((table) => ({
  run: table.run,
  steps: Array.from(decode(table.x, Float64Array)),
  columns: Object.fromEntries(Object.entries(table.y).map(([name, y]) => [name,
    Array.from(decode(y, Float32Array), (v) =>
      Number.isFinite(v) ? v : Number.isNaN(v) ? undefined : null)])),
}));

function short(value, unit = "") {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const isBytes = unit.startsWith("B");
  if (isBytes || size >= 1e5) {
    const suffixes = isBytes ? ["B", "kB", "MB", "GB", "TB"] : ["", "k", "M", "G", "T"];
    const power = Math.min(Math.max(Math.floor(Math.log10(size) / 3), 0), 4);
    return `${+(value / 1000 ** power).toPrecision(4)} ${suffixes[power]}`.trim();
  }
  return size < 1e-2 ? value.toExponential(2).replace(/\.?0+e/, "e") : String(+value.toPrecision(5));
}

function tick(x) {
  return Math.abs(x) >= 1e6 ? short(x) : (+x.toPrecision(6)).toLocaleString("en-US");
}

// --- the x axis: inner steps, or what a run has counted up to a step

let xAxis = "step";
const counters = {}; // metric -> for each run its table; only metrics that every run has
for (const name of Object.keys(X_AXES)) {
  const found = DATA.runs.map((_, run) => TABLES.find((t) => t.run === run && name in t.columns));
  if (found.every(Boolean)) counters[name] = found;
}

function toX(run, step) {
  if (xAxis === "step") return step;
  const { steps, columns } = counters[xAxis][run];
  const values = columns[xAxis];
  if (step <= steps[0]) return values[0] * (step / steps[0]);
  let low = 0;
  let high = steps.length - 1;
  if (step >= steps[high]) return values[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle;
  }
  const part = (step - steps[low]) / (steps[high] - steps[low]);
  return values[low] + part * (values[high] - values[low]);
}

// --- what a panel shows

let smoothing = 1;
// The mean of a point and the ones before it, `count` together; gaps stay.
function smooth(values, count) {
  if (count === 1) return values;
  let sum = 0;
  let number = 0;
  return values.map((value, k) => {
    const old = values[k - count];
    if (Number.isFinite(value)) { sum += value; number += 1; }
    if (Number.isFinite(old)) { sum -= old; number -= 1; }
    return Number.isFinite(value) ? sum / number : value;
  });
}

// The lines of a table share their steps; uPlot.join puts several tables over one x.
function joined(lines) {
  const byTable = new Map();
  for (const line of lines) byTable.set(line.table, [...(byTable.get(line.table) ?? []), line]);
  const tables = [...byTable].map(([number, members]) => {
    const { run, steps, columns } = TABLES[number];
    const ys = members.map(({ role, column }) =>
      role === "outer" ? columns[column] : smooth(columns[column], smoothing));
    return [steps.map((step) => toX(run, step)), ...ys];
  });
  const order = [...byTable.values()].flat();
  return [tables.length > 1 ? uPlot.join(tables) : tables[0], order];
}

// How a line is drawn. index: its place among the lines of its run and role.
function look({ role, run, index }, many) {
  if (role === "replica") {
    const stroke = !SINGLE ? colour(run) : many ? css("--many") : colour(2 + index);
    return { stroke, width: 1, alpha: SINGLE ? 0.8 : 0.4, points: { show: false } };
  }
  const stroke = SINGLE ? colour(role === "outer" ? 1 + index : index) : colour(run);
  const dash = SINGLE ? [] : DASHES[Math.min(index + cycle(run), DASHES.length - 1)];
  const points = role === "outer" ? { show: true, size: 5, fill: stroke } :
    { show: (u, s) => u.data[s].length < 2, size: 4 };
  return { stroke, width: role === "line" ? 1.5 : 2, dash, points };
}

const charts = [];

class Chart {
  constructor(panel, parent, isFirst) {
    this.panel = panel;
    this.log = false;
    this.height = isFirst ? 320 : 200;
    this.button = element("button", { type: "button", textContent: "log",
      ariaLabel: `logarithmic scale of ${panel.title}`, ariaPressed: "false" });
    this.button.onclick = () => {
      this.log = !this.log;
      this.button.ariaPressed = String(this.log);
      this.draw();
    };
    const unit = element("small", { textContent: panel.unit === "1" ? "" : `[${panel.unit}]` });
    this.host = element("div", { className: "plot", role: "img",
      ariaLabel: `chart of ${panel.title}; its last values are below it` });
    this.readout = element("div", { className: "readout" });
    parent.append(element("div", { className: `panel${isFirst ? " first" : ""}` },
      element("div", { className: "title" }, element("h3", {}, `${panel.title} `, unit), this.button),
      element("p", { className: "note", textContent: panel.note, hidden: !panel.note }),
      this.host, this.readout));
  }

  get shown() {
    const replicas = document.getElementById("replicas").checked;
    const counts = {};
    return this.panel.lines.map((line) => {
      const key = `${line.run} ${line.role}`;
      counts[key] = (counts[key] ?? -1) + 1;
      return { ...line, index: counts[key] };
    }).filter((line) => replicas || line.role !== "replica");
  }

  draw() {
    const zoom = this.plot && !resetting && { ...this.plot.scales.x };
    this.plot?.destroy();
    const [data, order] = joined(this.shown);
    this.order = order;
    this.many = order.filter((line) => line.role === "replica").length > FEW;
    const positive = data.slice(1).some((ys) => ys.some((y) => y > 0));
    this.button.hidden = !positive;
    const log = this.log && positive;
    const shown = !log ? data :
      data.map((ys, k) => (k ? ys.map((y) => (y > 0 || y === undefined ? y : null)) : ys));
    const axis = { stroke: css("--weak"), grid: { stroke: css("--grid"), width: 1 },
      ticks: { stroke: css("--grid"), width: 1 }, font: "12px system-ui, sans-serif" };
    this.plot = new uPlot({
      width: Math.max(this.host.clientWidth, 100), height: this.height,
      padding: [12, 16, 0, 0],
      scales: { x: { time: false, range: (u, low, high) => xRange(low, high) },
        y: { distr: log ? 3 : 1 } },
      axes: [
        { ...axis, values: (u, xs) => xs.map(tick), space: 56, size: 30 },
        { ...axis, size: 64, values: (u, ys) =>
          ys.map((y) => (y === null ? "" : short(y, this.panel.unit))) },
      ],
      series: [{}, ...order.map((line) => ({ label: line.label, ...look(line, this.many) }))],
      legend: { show: false },
      focus: { alpha: this.many ? 0.35 : 0.999 },
      cursor: { sync: { key: "steps", setSeries: false }, focus: { prox: this.many ? 20 : -1 },
        drag: { x: true, y: false }, points: { show: !this.many } },
      hooks: { draw: [drawMarks], setCursor: [() => this.read()], setSeries: [() => this.read()],
        setScale: [(u, key) => key === "x" && zoomOthers(this, u.scales.x)] },
    }, shown, this.host);
    this.ends = data.map((ys) => ys.findLastIndex((y) => y !== undefined));
    moveCursorByTouch(this.plot);
    if (zoom) this.plot.setScale("x", { min: zoom.min, max: zoom.max });
    this.read();
  }

  // The value of a line at the cursor, or its last one.
  valueAt(k) {
    const ys = this.plot.data[k];
    const { idx } = this.plot.cursor;
    // A replica that the run no longer has is not part of its last values.
    if (idx == null) return this.order[k - 1].is_gone ? undefined : ys[this.ends[k]];
    if (idx > this.ends[k]) return undefined; // beyond the end of a shorter run
    let row = idx;
    while (row >= 0 && ys[row] === undefined) row -= 1;
    return ys[row];
  }

  read() {
    if (!this.plot) return;
    const { unit } = this.panel;
    const { series, cursor: { idx } } = this.plot;
    const items = [];
    const replicas = {}; // run -> lines, where there are too many to list
    this.order.forEach((line, n) => {
      if (line.role === "replica" && this.many) (replicas[line.run] ??= []).push(n + 1);
      else items.push(item(series[n + 1], this.nameOf(line), short(this.valueAt(n + 1), unit)));
    });
    for (const [run, lines] of Object.entries(replicas)) {
      const values = lines.map((k) => this.valueAt(k)).filter(Number.isFinite);
      const range = values.length ?
        `${short(Math.min(...values), unit)} to ${short(Math.max(...values), unit)}` : "–";
      const name = `${SINGLE ? "" : `${DATA.runs[run].name}: `}${lines.length} replicas`;
      items.push(item(series[lines[0]], name, range));
    }
    const near = series.findIndex((line, k) => k && line._focus);
    const focused = this.order[near - 1];
    if (this.many && focused?.role === "replica") {
      items.push(item(series[near], this.nameOf(focused), short(this.valueAt(near), unit)));
    }
    const x = idx == null ? "last value" : `${X_AXES[xAxis] ?? "step"} ${whole(this.plot.data[0][idx])}`;
    this.readout.replaceChildren(element("span", { textContent: x, className: "note" }), ...items);
  }

  nameOf(line) {
    if (SINGLE) return line.label;
    const isOnly = new Set(this.panel.lines.map(({ label }) => label)).size === 1;
    return DATA.runs[line.run].name + (isOnly ? "" : `: ${line.label}`);
  }
}

// An entry below a chart: a piece of the line, its name and its value.
function item(series, name, value) {
  const stroke = series._stroke ?? series.stroke();
  const dash = Array.isArray(series.dash) ? series.dash.join(" ") : "";
  const entry = element("span", { title: `${name} ${value}` });
  entry.innerHTML = `<svg width="18" height="4"><line x1="0" x2="18" y1="2" y2="2"
    stroke-width="3" stroke="${stroke}" stroke-dasharray="${dash}"/></svg>`;
  entry.append(`${name} `, element("b", { textContent: value }));
  return entry;
}

function xRange(low, high) {
  if (low === null) return [0, 1];
  return low === high ? [low - 1, high + 1] : [low, high];
}

// Restarts as dashed lines, kept checkpoints as triangles on the axis.
function drawMarks(u) {
  const { ctx, bbox } = u;
  const ratio = uPlot.pxRatio;
  const bottom = bbox.top + bbox.height;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left - 5 * ratio, bbox.top, bbox.width + 10 * ratio, bbox.height);
  ctx.clip();
  DATA.runs.forEach((run, n) => {
    ctx.strokeStyle = ctx.fillStyle = SINGLE ? css("--weak") : colour(n);
    ctx.lineWidth = ratio;
    ctx.setLineDash([4 * ratio, 4 * ratio]);
    const position = (step) => u.valToPos(toX(n, step), "x", true);
    for (const x of run.restarts.map(position)) {
      ctx.beginPath();
      ctx.moveTo(Math.round(x), bbox.top);
      ctx.lineTo(Math.round(x), bottom);
      ctx.stroke();
    }
    for (const x of run.checkpoints.map(position)) {
      ctx.beginPath();
      ctx.moveTo(x - 4 * ratio, bottom);
      ctx.lineTo(x + 4 * ratio, bottom);
      ctx.lineTo(x, bottom - 7 * ratio);
      ctx.fill();
    }
  });
  ctx.restore();
}

let zooming = false;
let resetting = false;
function zoomOthers(from, { min, max }) {
  if (zooming || resetting || min == null) return;
  zooming = true;
  for (const chart of charts) if (chart !== from) chart.plot?.setScale("x", { min, max });
  zooming = false;
}

// A finger that moves sideways moves the cursor; up and down it scrolls the page.
function moveCursorByTouch(u) {
  const move = (event) => {
    const box = u.over.getBoundingClientRect();
    const { clientX, clientY } = event.touches[0];
    u.setCursor({ left: clientX - box.left, top: clientY - box.top });
  };
  u.over.addEventListener("touchstart", move, { passive: true });
  u.over.addEventListener("touchmove", move, { passive: true });
}

// Draws every chart that is unfolded, over the whole run.
function drawAll() {
  resetting = true;
  const isOpen = document.getElementById("others").open;
  for (const chart of charts) if (chart.panel.is_main || isOpen) chart.draw();
  resetting = false;
}

function paint() {
  for (const swatch of document.querySelectorAll(".swatch")) {
    const run = +swatch.dataset.run;
    const tone = colour(run);
    swatch.style.background = cycle(run) === 0 ? tone :
      `repeating-linear-gradient(90deg, ${tone} 0 3px, transparent 3px 5px)`;
    swatch.hidden = SINGLE;
  }
  for (const host of document.querySelectorAll(".lanes")) {
    drawLanes(host, DATA.timelines[+host.dataset.timeline], { css, colour, short, whole });
  }
}

function begin() {
  const get = (id) => document.getElementById(id);
  const others = get("others");
  for (const panel of DATA.panels) {
    const parent = panel.is_main ? get("panels") : others.querySelector(".grid");
    charts.push(new Chart(panel, parent, panel.title === "Loss"));
  }
  others.hidden = DATA.panels.every((panel) => panel.is_main);
  others.addEventListener("toggle", drawAll);
  const replicas = get("replicas");
  replicas.checked = SINGLE;
  replicas.closest("label").hidden =
    !DATA.panels.some((panel) => panel.lines.some((line) => line.role === "replica"));
  replicas.onchange = drawAll;
  const axis = get("x-axis");
  for (const name of Object.keys(counters)) axis.add(new Option(X_AXES[name], name));
  axis.closest("label").hidden = axis.length < 2;
  axis.onchange = () => { xAxis = axis.value; drawAll(); };
  const smooths = get("smoothing");
  smooths.onchange = () => { smoothing = +smooths.value; drawAll(); };
  get("whole").onclick = drawAll;
  const redraw = () => { drawAll(); paint(); };
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) { width = innerWidth; redraw(); }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  redraw();
}

begin();
