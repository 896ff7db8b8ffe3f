"use strict";
// Reads the numbers of the page, draws each panel with uPlot and keeps their cursors together.
const DATA = JSON.parse(document.getElementById("data").textContent);
const COLOURS = 7;
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const ROLES = { mean: 0, theta: 1 };
const SINGLE = DATA.runs.length === 1;
const FEW = 6; // replicas of one run that have a colour each; more are told apart by the cursor
// Beyond the colours lines are dashed.
const cycle = (run) => Math.floor(run / COLOURS);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = (n) => css(`--c${n % COLOURS}`);

function unpacked(text, Kind) {
  return new Kind(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
}

// NaN: no value there (undefined: the line goes on); infinity: a gap (null).
const TABLES = DATA.tables.map((table) => ({
  steps: Array.from(unpacked(table.x, Float64Array)),
  columns: Object.fromEntries(Object.entries(table.y).map(([name, y]) => [name,
    Array.from(unpacked(y, Float32Array), (v) =>
      Number.isFinite(v) ? v : Number.isNaN(v) ? undefined : null)])),
}));

function short(value, unit) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const suffix = unit === "B" ? ["B", "kB", "MB", "GB", "TB"] : ["", "k", "M", "G", "T"];
  if (unit === "B" || size >= 1e5) {
    const power = Math.min(Math.max(Math.floor(Math.log10(size) / 3), 0), 4);
    return `${+(value / 1000 ** power).toPrecision(4)} ${suffix[power]}`.trim();
  }
  return size < 1e-2 ? value.toExponential(2).replace(/\.?0+e/, "e") : String(+value.toPrecision(5));
}
const whole = (n) => Math.round(n).toLocaleString("en-US");

// --- the x axis: inner steps, or what a run has counted up to a step

const X_AXES = { "learning/tokens": "tokens", "dcn/bytes_sent_in_all": "bytes sent by a replica",
  "perf/wall_time_s": "seconds of wall time" };
const counters = {}; // metric -> for each run [steps, values] or undefined
for (const panel of DATA.panels) {
  if (!(panel.title in X_AXES)) continue;
  counters[panel.title] = [];
  for (const [, , run, table, column] of panel.series) {
    counters[panel.title][run] = [TABLES[table].steps, TABLES[table].columns[column]];
  }
  if (counters[panel.title].filter(Boolean).length < DATA.runs.length) delete counters[panel.title];
}
let xAxis = "step";

function interpolated(x, xs, ys) {
  let low = 0;
  let high = xs.length - 1;
  if (x <= xs[0]) return ys[0] * (x / xs[0]);
  if (x >= xs[high]) return ys[high];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return ys[low] + ((x - xs[low]) / (xs[high] - xs[low])) * (ys[high] - ys[low]);
}
function toX(run, step) {
  return xAxis === "step" ? step : interpolated(step, ...counters[xAxis][run]);
}

// --- one panel

let smoothing = 1;
// The mean of a point and the ones before it, `count` in all; gaps stay.
function smoothed(values, count) {
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

function joined(series) {
  // The series of a table share their steps; uPlot.join puts tables over one x.
  const byTable = new Map();
  for (const each of series) {
    if (!byTable.has(each.table)) byTable.set(each.table, []);
    byTable.get(each.table).push(each);
  }
  const tables = [];
  const order = [];
  for (const [table, members] of byTable) {
    const run = members[0].run;
    const xs = TABLES[table].steps;
    tables.push([xAxis === "step" ? xs : xs.map((s) => toX(run, s)), ...members.map((m) => {
      const values = TABLES[table].columns[m.column];
      return m.role === "theta" ? values : smoothed(values, smoothing);
    })]);
    order.push(...members);
  }
  return [tables.length > 1 ? uPlot.join(tables) : tables[0], order];
}

function looks(each, many) {
  const { role, run, index } = each;
  const points = { show: (u, s) => u.data[s].length < 2, size: 4 };
  if (role === "replica") {
    const own = SINGLE && !many ? colour(2 + index) : SINGLE ? css("--many") : colour(run);
    return { stroke: own, width: 1, alpha: SINGLE ? 0.8 : 0.4, points: { show: false } };
  }
  const tone = SINGLE ? colour(ROLES[role] ?? index) : colour(run);
  const dash = SINGLE ? [] : DASHES[Math.min(index + cycle(run), 3)];
  if (role === "theta") {
    const shown = SINGLE ? colour(1 + index) : tone;
    return { stroke: shown, width: 2, dash, points: { show: true, size: 5, fill: shown } };
  }
  return { stroke: tone, width: role === "mean" ? 2 : 1.5, dash, points };
}

const charts = [];
const sync = uPlot.sync("steps");

class Chart {
  constructor(panel, parent, height) {
    this.panel = panel;
    this.log = false;
    this.height = height;
    this.box = document.createElement("div");
    this.box.className = "panel" + (["Loss", "Loss of theta"].includes(panel.title) ? " first" : "");
    this.box.innerHTML = `<div class="title"><h3></h3><button type="button" aria-pressed="false">log
      </button></div><p class="note"></p><div class="plot"></div><div class="readout"></div>`;
    const head = this.box.querySelector("h3");
    head.textContent = panel.title + " ";
    if (panel.unit) head.append(Object.assign(document.createElement("small"),
      { textContent: `[${panel.unit}]` }));
    this.box.querySelector(".note").textContent = panel.note;
    this.box.querySelector(".note").hidden = !panel.note;
    this.readout = this.box.querySelector(".readout");
    const button = this.box.querySelector("button");
    button.onclick = () => {
      this.log = !this.log;
      button.setAttribute("aria-pressed", this.log);
      this.draw();
    };
    button.setAttribute("aria-label", `logarithmic scale of ${panel.title}`);
    const plot = this.box.querySelector(".plot");
    plot.setAttribute("role", "img");
    plot.setAttribute("aria-label", `chart of ${panel.title}; its last values are below it`);
    parent.append(this.box);
    this.button = button;
  }

  get shown() {
    const replicas = document.getElementById("replicas").checked;
    const count = {};
    return this.panel.series.map(([label, role, run, table, column, gone]) => {
      const key = `${run} ${role}`;
      count[key] = (count[key] ?? -1) + 1;
      return { label, role, run, table, column, gone, index: count[key] };
    }).filter((each) => replicas || each.role !== "replica");
  }

  draw() {
    const zoom = this.plot && [this.plot.scales.x.min, this.plot.scales.x.max];
    if (this.plot) this.plot.destroy();
    const [data, order] = joined(this.shown);
    this.order = order;
    const many = order.filter((each) => each.role === "replica").length > FEW;
    this.many = many;
    const positive = data.slice(1).some((ys) => ys.some((y) => y > 0));
    this.button.hidden = !positive;
    const host = this.box.querySelector(".plot");
    const line = { stroke: css("--weak"), grid: { stroke: css("--grid"), width: 1 },
      ticks: { stroke: css("--grid"), width: 1 }, font: "12px system-ui, sans-serif" };
    const scaled = this.log && positive
      ? data.map((ys, k) => (k ? ys.map((y) => (y > 0 ? y : y === undefined ? y : null)) : ys))
      : data;
    this.plot = new uPlot({
      width: Math.max(host.clientWidth, 100), height: this.height,
      scales: { x: { time: false, range: (u, low, high) => rangeOf(low, high) },
        y: { distr: this.log ? 3 : 1 } },
      axes: [
        { ...line, values: (u, xs) => xs.map((x) => tick(x)), space: 70, size: 30 },
        { ...line, size: 64, values: (u, ys) => ys.map((y) => (y === null ? "" :
          short(y, this.panel.unit))) },
      ],
      series: [{}, ...order.map((each) => ({ label: each.label, ...looks(each, many) }))],
      legend: { show: false },
      focus: { alpha: many ? 0.35 : 0.999 },
      cursor: { sync: { key: "steps", setSeries: false }, focus: { prox: many ? 20 : -1 },
        drag: { x: true, y: false }, points: { show: !many } },
      hooks: { draw: [(u) => marks(u)], setCursor: [() => this.read()],
        setSeries: [() => this.read()],
        setScale: [(u, key) => key === "x" && zoomAll(this, u.scales.x)] },
    }, scaled, host);
    this.ends = data.map((ys) => ys.findLastIndex((y) => y !== undefined));
    touch(this.plot);
    if (zoom && !resetting) this.plot.setScale("x", { min: zoom[0], max: zoom[1] });
    this.read();
  }

  read() {
    if (!this.plot) return;
    const { idx } = this.plot.cursor;
    const items = [];
    const near = this.plot.series.findIndex((s, k) => k && s._focus);
    const replicas = {};
    const at = (k) => {
      const ys = this.plot.data[k];
      // Of a replica that the run no longer has nothing is the last value of the run.
      if (idx === null || idx === undefined) return this.order[k - 1].gone ? undefined : last(ys);
      if (idx > this.ends[k]) return undefined; // beyond the end of a shorter run
      for (let i = idx; i >= 0; i--) if (ys[i] !== undefined) return ys[i];
      return undefined;
    };
    this.order.forEach((each, n) => {
      const value = at(n + 1);
      if (each.role === "replica" && this.many) {
        (replicas[each.run] ??= []).push([value, each, n]);
        return;
      }
      items.push(item(this.plot.series[n + 1], this.named(each), short(value, this.panel.unit)));
    });
    for (const [run, found] of Object.entries(replicas)) {
      const values = found.map(([v]) => v).filter((v) => Number.isFinite(v));
      const range = values.length ? `${short(Math.min(...values), this.panel.unit)} to ` +
        short(Math.max(...values), this.panel.unit) : "–";
      const before = SINGLE ? "" : `${DATA.runs[run].name}: `;
      items.push(item(this.plot.series[found[0][2] + 1], `${before}${found.length} replicas`, range));
    }
    const focused = this.order[near - 1];
    if (focused?.role === "replica" && this.many) {
      items.push(item(this.plot.series[near], this.named(focused),
        short(at(near), this.panel.unit)));
    }
    const x = idx === null || idx === undefined ? "last value" :
      `${xAxis === "step" ? "step" : X_AXES[xAxis]} ${whole(this.plot.data[0][idx])}`;
    this.readout.replaceChildren(Object.assign(document.createElement("span"),
      { textContent: x, className: "note" }), ...items);
  }

  named(each) {
    if (SINGLE) return each.label;
    const single = new Set(this.panel.series.map(([label]) => label)).size === 1;
    return DATA.runs[each.run].name + (single ? "" : `: ${each.label}`);
  }
}

function last(ys) {
  return ys.findLast((y) => y !== undefined);
}

function item(series, name, value) {
  const span = document.createElement("span");
  const dash = typeof series.dash === "object" && series.dash ? series.dash.join(" ") : "";
  span.innerHTML = `<svg width="18" height="4"><line x1="0" x2="18" y1="2" y2="2" stroke-width="3"
    stroke="${series._stroke ?? series.stroke()}" stroke-dasharray="${dash}"/></svg>`;
  span.append(`${name} `, Object.assign(document.createElement("b"), { textContent: value }));
  span.title = `${name} ${value}`;
  return span;
}

function rangeOf(low, high) {
  if (low === null) return [0, 1];
  return low === high ? [low - 1, high + 1] : [low, high];
}
function tick(x) {
  return Math.abs(x) >= 1e6 ? short(x, "") : (+x.toPrecision(6)).toLocaleString("en-US");
}

// Restarts as dashed lines, kept checkpoints as triangles on the axis.
function marks(u) {
  const { ctx, bbox } = u;
  const ratio = uPlot.pxRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  DATA.runs.forEach((run, n) => {
    ctx.strokeStyle = ctx.fillStyle = SINGLE ? css("--weak") : colour(n);
    ctx.lineWidth = ratio;
    ctx.setLineDash([4 * ratio, 4 * ratio]);
    for (const step of run.restarts) {
      const x = Math.round(u.valToPos(toX(n, step), "x", true));
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    for (const step of run.checkpoints) {
      const x = u.valToPos(toX(n, step), "x", true);
      const y = bbox.top + bbox.height;
      ctx.beginPath();
      ctx.moveTo(x - 4 * ratio, y);
      ctx.lineTo(x + 4 * ratio, y);
      ctx.lineTo(x, y - 7 * ratio);
      ctx.fill();
    }
  });
  ctx.restore();
}

let zooming = false;
let resetting = false;
function zoomAll(from, { min, max }) {
  if (zooming || resetting || min === null || min === undefined) return;
  zooming = true;
  for (const chart of charts) {
    if (chart !== from && chart.plot) chart.plot.setScale("x", { min, max });
  }
  zooming = false;
}

// A finger that moves sideways moves the cursor; up and down it scrolls the page.
function touch(u) {
  const move = (event) => {
    const box = u.over.getBoundingClientRect();
    const { clientX, clientY } = event.touches[0];
    u.setCursor({ left: clientX - box.left, top: clientY - box.top });
  };
  u.over.addEventListener("touchstart", move, { passive: true });
  u.over.addEventListener("touchmove", move, { passive: true });
}

function drawAll() {
  resetting = true;
  const open = document.getElementById("others").open;
  for (const chart of charts) if (chart.panel.main || open) chart.draw();
  resetting = false;
}

function begin() {
  const main = document.getElementById("panels");
  const others = document.getElementById("others");
  for (const panel of DATA.panels) {
    const height = panel.title === "Loss" ? 320 : 200;
    charts.push(new Chart(panel, panel.main ? main : others.querySelector(".grid"), height));
  }
  others.hidden = DATA.panels.every((panel) => panel.main);
  others.addEventListener("toggle", () => drawAll());
  const replicas = document.getElementById("replicas");
  replicas.checked = SINGLE;
  replicas.closest("label").hidden = !DATA.panels.some((p) => p.series.some((s) => s[1] === "replica"));
  replicas.onchange = drawAll;
  const axis = document.getElementById("x-axis");
  for (const name of Object.keys(counters)) axis.add(new Option(X_AXES[name], name));
  axis.closest("label").hidden = axis.length < 2;
  axis.onchange = () => { xAxis = axis.value; drawAll(); };
  const smooth = document.getElementById("smoothing");
  smooth.onchange = () => { smoothing = +smooth.value; drawAll(); };
  document.getElementById("whole").onclick = drawAll;
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth !== width) { width = innerWidth; drawAll(); paint(); }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { drawAll(); paint(); });
  drawAll();
  paint();
  // After the microtasks in which uPlot draws.
  queueMicrotask(() => {
    const root = document.documentElement.dataset;
    root.charts = document.querySelectorAll(".uplot").length;
    root.ready = Math.round(performance.now());
  });
}

function paint() {
  for (const swatch of document.querySelectorAll(".swatch")) {
    const tone = colour(+swatch.dataset.run);
    swatch.style.background = cycle(+swatch.dataset.run) === 0 ? tone :
      `repeating-linear-gradient(90deg, ${tone} 0 3px, transparent 3px 5px)`;
    swatch.hidden = SINGLE;
  }
  for (const host of document.querySelectorAll(".lanes")) {
    drawLanes(host, DATA.timelines[+host.dataset.timeline], { css, colour, short, whole });
  }
}

begin();
