"use strict";
// The schedule: a lane for each fragment with its exchanges, and below it the bytes of each step.
function drawLanes(host, timeline, { css, colour, short, whole }) {
  host.replaceChildren();
  const [first, lastStep] = timeline.steps;
  const P = timeline.fragments;
  const xs = timeline.bytes.map((_, k) => first + k);
  const axis = { stroke: css("--weak"), font: "12px system-ui, sans-serif",
    grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid"), width: 1 } };
  const steps = { ...axis, values: (u, found) => found.map(String), size: 30, space: 60,
    incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] };
  const side = { ...axis, size: 76, labelSize: 20, labelFont: axis.font };
  const x = { time: false, range: () => [first - 1.5, lastStep + 1] };
  const cursor = { sync: { key: `lanes${host.dataset.timeline}`, setSeries: false },
    drag: { x: false, y: false }, points: { show: false }, y: false };
  const width = Math.max(host.clientWidth, 100);
  const readout = document.createElement("div");
  readout.className = "readout";
  const lane = Math.max(6, Math.min(26, 420 / P));

  function bars(u) {
    const { ctx } = u;
    const ratio = uPlot.pxRatio;
    const half = (lane * ratio) / 2;
    const at = (step) => u.valToPos(step, "x", true);
    const size = Math.max(4 * ratio, Math.min(half * 0.6, 0.5 * (at(first + 1) - at(first))));
    ctx.save();
    ctx.beginPath();
    ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
    ctx.clip();
    for (const [fragment, send, apply, chunks] of timeline.exchanges) {
      const y = u.valToPos(fragment, "y", true);
      ctx.fillStyle = colour(fragment);
      ctx.globalAlpha = 0.25;
      ctx.fillRect(at(send), y - half * 0.7, Math.max(at(apply) - at(send), ratio), half * 1.4);
      ctx.globalAlpha = 1;
      for (const step of chunks) {
        const left = at(step - 1);
        ctx.fillRect(left, y - half * 0.7, Math.max(at(step) - left - ratio, ratio), half * 1.4);
      }
      // One above the middle and one below: eager and delayed send and apply in the same step.
      triangle(ctx, at(send), y - half * 0.35, size, 1);
      triangle(ctx, at(apply), y + half * 0.35, size, -1);
    }
    ctx.restore();
  }

  function triangle(ctx, left, y, size, direction) {
    // Up: a send; down: an apply.
    ctx.fillStyle = css("--text");
    ctx.beginPath();
    ctx.moveTo(left, y - direction * size);
    ctx.lineTo(left - size * 0.6, y + direction * size * 0.4);
    ctx.lineTo(left + size * 0.6, y + direction * size * 0.4);
    ctx.fill();
  }

  function read(u) {
    const { idx } = u.cursor;
    if (idx === null || idx === undefined) {
      readout.textContent = "▲ send · ▼ apply · full: an inner step that carries a chunk · pale: " +
        "sent, not yet applied";
      return;
    }
    const step = xs[idx];
    const found = timeline.exchanges.flatMap(([fragment, send, apply, chunks]) => [
      send === step ? `sends fragment ${fragment}` : "",
      chunks.includes(step) ? `carries chunk ${chunks.indexOf(step)} of fragment ${fragment}` : "",
      apply === step ? `applies fragment ${fragment} (sent after ${whole(send)})` : "",
    ]).filter(Boolean);
    readout.textContent = `step ${whole(step)}: ${short(timeline.bytes[idx], "B")} sent` +
      found.map((text) => `; ${text}`).join("");
  }

  const lanes = new uPlot({
    width, height: Math.round(lane * P + 46), cursor, legend: { show: false },
    scales: { x, y: { dir: -1, range: () => [-0.6, P - 0.4] } },
    axes: [steps, { ...side, label: "fragment", grid: { show: false }, splits: () => everyFew(P),
      values: (u, found) => found.map(String) }],
    series: [{}, { stroke: "transparent", points: { show: false } }],
    hooks: { draw: [bars], setCursor: [read] },
  }, [xs, xs.map(() => null)], host);
  if (timeline.bytes.some((n) => n > 0)) new uPlot({
    width, height: 110, cursor, legend: { show: false },
    scales: { x, y: { range: (u, low, high) => [0, (high || 1) * 1.1] } },
    axes: [steps, { ...side, label: "sent", space: 30,
      values: (u, found) => found.map((n) => short(n, "B")) }],
    series: [{}, { stroke: colour(0), fill: colour(0), width: 0, points: { show: false },
      paths: uPlot.paths.bars({ size: [0.8, 60], align: -1 }) }],
    hooks: { setCursor: [read] },
  }, [xs, timeline.bytes], host);
  host.append(readout);
  read(lanes);
}

function everyFew(P) {
  const step = Math.ceil(P / 12);
  return Array.from({ length: Math.ceil(P / step) }, (_, k) => k * step);
}
