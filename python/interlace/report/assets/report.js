"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const root = document.documentElement;
const KINDS = data.memory.kinds;
let colors = {};

function readColors() {
  const style = getComputedStyle(root);
  const names = ["card", "ink", "quiet", "line", "track", "accent", "bad", "path", "fwd", "bwd", "upd", "gather", "reduce", "p2p", "h2d",
    "d2h", "file", "host", "wait", ...KINDS];
  colors = Object.fromEntries(names.map((name) => [name, style.getPropertyValue("--" + name).trim()]));
}

// ---- numbers ----
function digits(value) {
  const size = Math.abs(value);
  return size < 10 ? value.toFixed(2) : size < 100 ? value.toFixed(1) : Math.round(value).toLocaleString("en-US");
}
function timeText(ns) {
  const us = ns / 1e3;
  if (us === 0) return "0";
  if (Math.abs(us) >= 1e6) return digits(us / 1e6) + " s";
  return Math.abs(us) >= 1e3 ? digits(us / 1e3) + " ms" : digits(us) + " µs";
}
function bytesText(bytes) {
  for (const [power, unit] of [[40, "TiB"], [30, "GiB"], [20, "MiB"], [10, "KiB"]]) {
    if (Math.abs(bytes) >= 2 ** power) return digits(bytes / 2 ** power) + " " + unit;
  }
  return Math.round(bytes) + " B";
}
function escapeText(text) {
  return String(text).replace(/[&<>"]/g, (c) => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})[c]);
}

// ---- timelines: typed arrays by lane ----
function readTimeline(source, title) {
  if (!source) return null;
  const lanes = source.lanes.map(({name, events}) => {
    const computes = name === "compute" || name.startsWith("stage ");
    const count = events.length / 5;
    const lane = {name, count, start: new Float64Array(count), end: new Float64Array(count), latest: new Float64Array(count),
      what: new Int32Array(count), bytes: new Float64Array(count), color: new Array(count)};
    let at = 0, latest = 0;
    for (let i = 0; i < count; i++) {
      at += events[5 * i];
      lane.start[i] = at;
      lane.end[i] = at + events[5 * i + 1];
      lane.latest[i] = latest = Math.max(latest, lane.end[i]);
      lane.what[i] = events[5 * i + 2];
      lane.bytes[i] = events[5 * i + 3];
      const part = source.text[source.what[lane.what[i]][2]];
      lane.color[i] = events[5 * i + 4] ? "wait" : !computes ? (colors[name.split(" ")[0]] ? name.split(" ")[0] : name.startsWith("sends") ? "p2p" : "host") : part === "bwd" || part === "upd" ? part : "fwd";
    }
    return lane;
  });
  return {title, source, lanes, span: source.span_ns};
}
// The first event that ends after `time`.
function firstAfter(lane, time) {
  let low = 0, high = lane.count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (lane.latest[middle] > time) high = middle; else low = middle + 1;
  }
  return low;
}

readColors();
const timelines = [readTimeline(data.predicted, "Predicted"), readTimeline(data.measured, "Measured")].filter(Boolean);
const whole = Math.max(1, ...timelines.map((t) => t.span));
const view = {from: 0, to: whole};
const LANE = 24, TITLE = 22, AXIS = 34, GAP = 10;

const timeline = document.getElementById("timeline");
const memory = document.getElementById("memory");  // null on the page of a plan
const arena = document.getElementById("arena");  // null without one
const canvases = [timeline, memory, arena].filter(Boolean);
const gutter = () => (timeline.clientWidth < 560 ? 58 : 84);

function rowsOf() {
  const rows = [];
  let y = AXIS;
  for (const each of timelines) {
    rows.push({y, title: each.title, timeline: each});
    y += TITLE;
    for (const lane of each.lanes) {
      rows.push({y, lane, timeline: each});
      y += LANE;
    }
    y += GAP;
  }
  return {rows, height: y};
}
const layout = rowsOf();

function prepare(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    canvas.style.height = height + "px";
  }
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, width, height);
  g.font = '12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
  g.textBaseline = "middle";
  return {g, width};
}

function ticks(from, to, width) {
  const rough = (to - from) / Math.max(2, width / (width < 500 ? 70 : 110));
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough);
  const out = [];
  for (let t = Math.ceil(from / step) * step; t <= to; t += step) out.push(t);
  return {out, step};
}
function drawAxis(g, left, width, top, bottom, label) {
  const scale = (width - left) / (view.to - view.from);
  const {out, step} = ticks(view.from, view.to, width - left);
  const unit = step >= 1e8 ? [1e9, "s"] : step >= 1e5 ? [1e6, "ms"] : [1e3, "µs"];
  const places = Math.max(0, -Math.floor(Math.log10(step / unit[0]) + 1e-9));
  g.strokeStyle = colors.line;
  g.lineWidth = 1;
  g.fillStyle = colors.quiet;
  for (const t of out) {
    const x = Math.round(left + (t - view.from) * scale) + 0.5;
    g.beginPath();
    g.moveTo(x, top);
    g.lineTo(x, bottom);
    g.stroke();
    const text = (t / unit[0]).toFixed(places) + " " + unit[1];
    if (label && x + g.measureText(text).width + 4 < width) g.fillText(text, x + 4, top + 8);
  }
}

// Ops narrower than a pixel are summed into the share of each pixel that they fill.
function drawLane(g, lane, y, height, left, width) {
  const scale = (width - left) / (view.to - view.from);
  const shares = new Map();
  const columns = Math.ceil(width - left) + 1;
  const names = [];
  for (let i = firstAfter(lane, view.from); i < lane.count && lane.start[i] < view.to; i++) {
    const x0 = Math.max(0, (lane.start[i] - view.from) * scale), x1 = Math.min(width - left, (lane.end[i] - view.from) * scale);
    if (x1 <= x0) continue;
    const color = lane.color[i];
    if (x1 - x0 >= 1.5) {
      g.fillStyle = colors[color];
      g.globalAlpha = 1;
      g.fillRect(left + x0, y, Math.max(x1 - x0 - (x1 - x0 > 4 ? 0.75 : 0), 1), height);
      if (x1 - x0 > 46 && color !== "wait") names.push([i, x0, x1]);
      continue;
    }
    let share = shares.get(color);
    if (!share) shares.set(color, share = new Float32Array(columns));
    const a = Math.floor(x0), b = Math.floor(x1);
    if (a === b) share[a] += x1 - x0;
    else { share[a] += b - x0; share[b] += x1 - b; }
  }
  for (const [color, share] of shares) {
    g.fillStyle = colors[color];
    for (let x = 0; x < columns; x++) {
      if (share[x] <= 0) continue;
      g.globalAlpha = Math.min(1, Math.max(share[x], 0.12));
      g.fillRect(left + x, y, 1, height);
    }
  }
  g.globalAlpha = 1;
  return names;
}
function shortName(op) {
  return op.replace(/^aten\./, "").replace(/\.(default|Tensor|out|start)$/, "");
}
function drawNames(g, each, lane, y, height, left, names) {
  g.fillStyle = "#fff";
  for (const [i, x0, x1] of names) {
    const [op, , , , detail] = each.source.what[lane.what[i]].map((n) => each.source.text[n]);
    let text = shortName(op) + (detail ? " " + detail : "");
    if (g.measureText(text).width > x1 - x0 - 8) text = shortName(op);
    if (g.measureText(text).width <= x1 - x0 - 8) g.fillText(text, left + x0 + 4, y + height / 2 + 0.5);
  }
}

function drawTimeline() {
  const {g, width} = prepare(timeline, layout.height);
  const left = gutter();
  const scale = (width - left) / (view.to - view.from);
  drawAxis(g, left, width, 0, layout.height, true);
  g.font = "11px system-ui, sans-serif";
  let lastRight = -1;
  for (const phase of data.phases) {
    const x0 = left + Math.max(0, (phase.start_us * 1e3 - view.from) * scale), x1 = left + Math.min(width - left, (phase.end_us * 1e3 - view.from) * scale);
    if (x1 <= left || x0 >= width || x1 - x0 < 1) continue;
    g.fillStyle = colors.track;
    g.fillRect(x0 + 0.5, 17, Math.max(x1 - x0 - 1, 1), 14);
    g.fillStyle = colors.quiet;
    const name = phase.name.replace("_", "-");
    if (x0 > lastRight && g.measureText(name).width + 10 < x1 - x0) {
      g.fillText(name, x0 + 5, 24.5);
      lastRight = x0;
    }
  }
  for (const {y, title, lane, timeline: each} of layout.rows) {
    if (title) {
      g.font = "600 12px system-ui, sans-serif";
      g.fillStyle = colors.ink;
      g.fillText(title + "  ", 0, y + 11);
      const wide = g.measureText(title + "  ").width;
      g.font = "12px system-ui, sans-serif";
      g.fillStyle = colors.quiet;
      g.fillText(timeText(each.span), wide, y + 11);
      continue;
    }
    g.font = "12px system-ui, sans-serif";
    g.fillStyle = colors.quiet;
    g.fillText(lane.name.length > 11 ? lane.name.slice(0, 10) + "…" : lane.name, 0, y + LANE / 2 - 1);
    g.font = "11px system-ui, sans-serif";
    g.save();
    g.beginPath();
    g.rect(left, y, width - left, LANE);
    g.clip();
    drawNames(g, each, lane, y, LANE - 6, left, drawLane(g, lane, y, LANE - 6, left, width));
    g.restore();
  }
  drawPath(g, left, width, scale);
}
function drawPath(g, left, width, scale) {
  const predicted = timelines[0];
  const rank = predicted.source.rank;
  const top = new Map(layout.rows.filter((row) => row.lane && row.timeline === predicted).map((row) => [row.lane.name, row.y]));
  g.fillStyle = colors.path;
  for (const piece of data.path) {
    const y = top.get(piece.lane === "launch" ? "compute" : piece.lane);
    if (y === undefined || (piece.rank !== rank && piece.lane === "compute")) continue;
    const x0 = Math.max(0, (piece.start_us * 1e3 - view.from) * scale), x1 = Math.min(width - left, (piece.end_us * 1e3 - view.from) * scale);
    if (x1 > x0) g.fillRect(left + x0, y + LANE - 6, Math.max(x1 - x0, 0.75), 2);
  }
}

// ---- memory: stacked kinds as steps over the same stretch of time ----
const HEIGHT = 220, AXIS_ROOM = 18;
const samples = data.memory;
const kindsShown = KINDS.map((_, k) => k).filter((k) => samples.bytes.some((row) => row[k] > 0));
const measuredMemory = timelines.length > 1 ? timelines[1].source.memory : [];
const mostBytes = Math.max(1, ...samples.bytes.map((row) => row.reduce((a, b) => a + b, 0)), ...measuredMemory.map((s) => s[1]));

function niceBytes(most) {
  const power = 2 ** Math.floor(Math.log2(most / 4));
  return [1, 2, 4].map((n) => n * power).find((step) => most / step <= 5) || power * 4;
}
function sampleAt(time) {
  let low = 0, high = samples.time_us.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (samples.time_us[middle] * 1e3 > time) high = middle; else low = middle + 1;
  }
  return low - 1;
}
function drawMemory() {
  const {g, width} = prepare(memory, HEIGHT);
  const left = gutter(), bottom = HEIGHT - 2, top = AXIS_ROOM + 4;
  const scale = (width - left) / (view.to - view.from), up = (bottom - top) / (mostBytes * 1.04);
  g.font = "12px system-ui, sans-serif";
  drawAxis(g, left, width, 0, bottom, true);
  const step = niceBytes(mostBytes);
  for (let b = 0; b <= mostBytes * 1.04; b += step) {
    const y = Math.round(bottom - b * up) + 0.5;
    g.strokeStyle = colors.line;
    g.beginPath();
    g.moveTo(left, y);
    g.lineTo(width, y);
    g.stroke();
    g.fillStyle = colors.quiet;
    if (b > 0) g.fillText(bytesText(b), 0, y);
  }
  g.save();
  g.beginPath();
  g.rect(left, 0, width - left, HEIGHT);
  g.clip();
  // For every pixel the highest sample in it, so that short peaks are seen.
  const pixels = Math.ceil(width - left);
  const best = new Int32Array(pixels).fill(-1);
  const totals = samples.bytes.map((row) => row.reduce((a, b) => a + b, 0));
  for (let x = 0; x < pixels; x++) {
    const from = view.from + x / scale;
    if (from > data.predicted.span_ns) break;
    best[x] = Math.max(0, sampleAt(from));
    for (let i = best[x] + 1; i < totals.length && samples.time_us[i] * 1e3 < from + 1 / scale; i++) if (totals[i] > totals[best[x]]) best[x] = i;
  }
  const floor = new Float64Array(pixels);
  for (const k of kindsShown) {
    g.fillStyle = colors[KINDS[k]];
    for (let x = 0; x < pixels;) {
      if (best[x] < 0) { x++; continue; }
      let end = x + 1;
      while (end < pixels && best[end] === best[x]) end++;
      const bytes = samples.bytes[best[x]][k];
      const base = floor[x];
      if (bytes > 0) {
        const y0 = bottom - (base + bytes) * up;
        g.fillRect(left + x, y0, end - x, bottom - base * up - y0 + 0.4);
      }
      for (let i = x; i < end; i++) floor[i] = base + bytes;
      x = end;
    }
  }
  if (samples.peak_us !== undefined) {
    const x = left + (samples.peak_us * 1e3 - view.from) * scale;
    if (x >= left) {
      g.strokeStyle = colors.ink;
      g.setLineDash([3, 3]);
      g.beginPath();
      g.moveTo(x, top - 4);
      g.lineTo(x, bottom);
      g.stroke();
      g.setLineDash([]);
      g.fillStyle = colors.ink;
      const wide = g.measureText("peak").width;
      g.fillText("peak", x + 5 + wide > width ? x - 5 - wide : x + 5, top + 2);
    }
  }
  const limit = bottom - data.limit_bytes * up;
  if (limit > top - 6) {
    g.strokeStyle = colors.bad;
    g.beginPath();
    g.moveTo(left, limit);
    g.lineTo(width, limit);
    g.stroke();
  }
  if (measuredMemory.length) {
    g.strokeStyle = colors.ink;
    g.lineWidth = 1.5;
    g.beginPath();
    let before = measuredMemory[0][1];
    for (const [time, bytes] of measuredMemory) {
      const x = left + (time - view.from) * scale;
      g.lineTo(x, bottom - before * up);
      g.lineTo(x, bottom - bytes * up);
      before = bytes;
    }
    g.stroke();
    g.lineWidth = 1;
  }
  g.restore();
}

// ---- the arena: each storage a box, address over the same stretch of time ----
const PIECE = {offset: 0, bytes: 1, start: 2, end: 3, kind: 4, name: 5, module: 6};
const ARENA_HEIGHT = 280;
const pieces = data.arena ? data.arena.pieces : [];
const arenaTop = data.arena ? Math.max(1, data.arena.reserved_bytes) : 1;
function arenaPlace(width) {
  const left = gutter(), bottom = ARENA_HEIGHT - 2, top = AXIS_ROOM + 4;
  return {left, bottom, top, scale: (width - left) / (view.to - view.from), up: (bottom - top) / arenaTop};
}
function drawArena() {
  const {g, width} = prepare(arena, ARENA_HEIGHT);
  const {left, bottom, top, scale, up} = arenaPlace(width);
  drawAxis(g, left, width, 0, bottom, true);
  const step = niceBytes(arenaTop);
  for (let b = 0; b <= arenaTop; b += step) {
    const y = Math.round(bottom - b * up) + 0.5;
    g.strokeStyle = colors.line;
    g.beginPath();
    g.moveTo(left, y);
    g.lineTo(width, y);
    g.stroke();
    g.fillStyle = colors.quiet;
    if (b > 0) g.fillText(bytesText(b), 0, Math.max(y, top));
  }
  g.save();
  g.beginPath();
  g.rect(left, 0, width - left, ARENA_HEIGHT);
  g.clip();
  g.font = "11px system-ui, sans-serif";
  for (const p of pieces) {
    const x0 = left + Math.max(0, (p[PIECE.start] * 1e3 - view.from) * scale), x1 = left + Math.min(width - left, (p[PIECE.end] * 1e3 - view.from) * scale);
    if (x1 <= left || x0 >= width || x1 < x0) continue;
    const y1 = bottom - p[PIECE.offset] * up, y0 = bottom - (p[PIECE.offset] + p[PIECE.bytes]) * up;
    const wide = Math.max(x1 - x0, 0.75), high = Math.max(y1 - y0, 0.75);
    g.fillStyle = colors[KINDS[p[PIECE.kind]]];
    g.fillRect(x0, y0, wide, high);
    if (wide < 5 || high < 5) continue;
    g.strokeStyle = colors.card;
    g.strokeRect(x0 + 0.5, y0 + 0.5, wide - 1, high - 1);
    const text = data.arena.names[p[PIECE.name]];
    if (high < 14 || g.measureText(text).width > wide - 10) continue;
    g.fillStyle = "#fff";
    g.fillText(text, x0 + 5, (y0 + y1) / 2 + 0.5);
  }
  g.restore();
}

let waiting = false;
function draw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    if (timeline.clientWidth <= gutter()) return;  // not shown
    drawTimeline();
    if (memory) drawMemory();
    if (arena) drawArena();
  });
}

// ---- moving and zooming ----
const LEAST = 200;
function show(from, to) {
  let length = Math.min(Math.max(to - from, Math.min(LEAST, whole)), whole);
  from = Math.min(Math.max(from, 0), whole - length);
  view.from = from;
  view.to = from + length;
  draw();
}
function zoom(factor, around = (view.from + view.to) / 2) {
  const from = around - (around - view.from) * factor;
  show(from, from + (view.to - view.from) * factor);
}
function timeAt(canvas, clientX) {
  const box = canvas.getBoundingClientRect(), left = gutter();
  return view.from + (clientX - box.left - left) / (box.width - left) * (view.to - view.from);
}
for (const button of document.querySelectorAll("[data-zoom]")) {
  button.addEventListener("click", () => {
    const how = button.dataset.zoom;
    if (how === "all") show(0, whole); else zoom(how === "in" ? 0.5 : 2);
  });
}
for (const canvas of canvases) {
  const pointers = new Map();
  canvas.addEventListener("wheel", (event) => {
    const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    if (!event.ctrlKey && !event.metaKey && !sideways && !event.shiftKey) return;
    event.preventDefault();
    const length = view.to - view.from;
    if (event.ctrlKey || event.metaKey) zoom(Math.exp(Math.max(-120, Math.min(120, event.deltaY)) * 0.004), timeAt(canvas, event.clientX));
    else {
      const by = (sideways ? event.deltaX : event.deltaY) / (canvas.clientWidth - gutter()) * length;
      show(view.from + by, view.to + by);
    }
  }, {passive: false});
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, event.clientX);
    canvas.classList.add("drag");
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!pointers.has(event.pointerId)) return;
    hideTip();
    const length = view.to - view.from, pixels = canvas.clientWidth - gutter();
    const before = [...pointers.values()];
    pointers.set(event.pointerId, event.clientX);
    const now = [...pointers.values()];
    if (now.length === 1) {
      const by = (before[0] - now[0]) / pixels * length;
      show(view.from + by, view.to + by);
    } else {
      zoom(Math.max(Math.abs(before[0] - before[1]), 8) / Math.max(Math.abs(now[0] - now[1]), 8), timeAt(canvas, (now[0] + now[1]) / 2));
    }
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, (event) => {
      pointers.delete(event.pointerId);
      if (!pointers.size) canvas.classList.remove("drag");
    });
  }
  canvas.addEventListener("keydown", (event) => {
    const length = view.to - view.from;
    const moves = {ArrowLeft: -0.15, ArrowRight: 0.15, a: -0.15, d: 0.15};
    const zooms = {"+": 0.6, "=": 0.6, w: 0.6, "-": 1 / 0.6, s: 1 / 0.6};
    if (event.key in moves) show(view.from + moves[event.key] * length, view.to + moves[event.key] * length);
    else if (event.key in zooms) zoom(zooms[event.key]);
    else if (event.key === "0") show(0, whole);
    else return;
    event.preventDefault();
  });
}

// ---- what is under the pointer ----
function eventAt(clientX, clientY) {
  const box = timeline.getBoundingClientRect(), y = clientY - box.top, left = gutter();
  const row = layout.rows.find((r) => r.lane && y >= r.y && y < r.y + LANE - 2);
  if (!row || clientX - box.left < left) return null;
  const time = timeAt(timeline, clientX), near = 3 * (view.to - view.from) / (box.width - left);
  const lane = row.lane;
  let found = -1, distance = near;
  for (let i = firstAfter(lane, time - near); i < lane.count && lane.start[i] <= time + near; i++) {
    const away = time < lane.start[i] ? lane.start[i] - time : time > lane.end[i] ? time - lane.end[i] : 0;
    if (away < distance || (away === 0 && lane.end[i] > lane.start[i])) {
      found = i;
      distance = away;
    }
  }
  return found < 0 ? null : {row, lane, i: found};
}
function hideTip() { tip.hidden = true; }
function showTip(html, x, y) {
  tip.innerHTML = html;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(8, Math.min(x + 14, window.innerWidth - box.width - 8)) + "px";
  tip.style.top = (y + 18 + box.height > window.innerHeight ? Math.max(8, y - box.height - 12) : y + 18) + "px";
}
timeline.addEventListener("pointermove", (event) => {
  if (timeline.classList.contains("drag")) return;
  const at = eventAt(event.clientX, event.clientY);
  if (!at) return hideTip();
  const {row, lane, i} = at;
  const [op, module, part, source, detail] = row.timeline.source.what[lane.what[i]].map((n) => row.timeline.source.text[n]);
  const duration = lane.end[i] - lane.start[i];
  const parts = {fwd: "forward", bwd: "backward", upd: "update"};
  const lines = [`<b>${escapeText(op)}${detail ? " " + escapeText(detail) : ""}</b>`];
  if (lane.color[i] === "wait") lines.push("<div>waits for a transfer</div>");
  if (module) lines.push(`<div>${escapeText(module)}</div>`);
  if (source) lines.push(`<div>${escapeText(source)}</div>`);
  let facts = timeText(duration) + ` at ${timeText(lane.start[i])}`;
  if (parts[part]) facts += ", " + parts[part];
  if (lane.bytes[i] > 0) facts += `, ${bytesText(lane.bytes[i])}` + (duration > 0 ? ` (${digits(lane.bytes[i] / duration)} GB/s)` : "");
  lines.push(`<div>${facts}</div>`);
  showTip(lines.join(""), event.clientX, event.clientY);
});
memory?.addEventListener("pointermove", (event) => {
  if (memory.classList.contains("drag")) return;
  const time = timeAt(memory, event.clientX);
  const i = sampleAt(time);
  if (i < 0 || time > data.predicted.span_ns) return hideTip();
  const row = samples.bytes[i];
  const cells = kindsShown.filter((k) => row[k] > 0).sort((a, b) => row[b] - row[a])
    .map((k) => `<tr><td><i class="dot k-${KINDS[k]}"></i>${KINDS[k]}</td><td>${bytesText(row[k])}</td></tr>`);
  showTip(`<b>${bytesText(row.reduce((a, b) => a + b, 0))}</b> at ${timeText(time)}<table>${cells.join("")}</table>`, event.clientX, event.clientY);
});
arena?.addEventListener("pointermove", (event) => {
  if (arena.classList.contains("drag")) return;
  const box = arena.getBoundingClientRect(), {left, bottom, up} = arenaPlace(box.width);
  if (event.clientX - box.left < left) return hideTip();
  const near = 2 * (view.to - view.from) / (box.width - left) / 1e3, time = timeAt(arena, event.clientX) / 1e3;
  const address = (bottom - (event.clientY - box.top)) / up, close = 1 / up;
  let found = null, away = Infinity;
  for (const p of pieces) {
    const late = Math.max(p[PIECE.start] - time, time - p[PIECE.end], 0) / near, high = Math.max(p[PIECE.offset] - address, address - p[PIECE.offset] - p[PIECE.bytes], 0) / close;
    if (late <= 1 && high <= 1 && late + high < away) {
      found = p;
      away = late + high;
    }
  }
  if (!found) return hideTip();
  const module = data.arena.names[found[PIECE.module]], lives = (found[PIECE.end] - found[PIECE.start]) * 1e3;
  const lines = [`<b>${escapeText(data.arena.names[found[PIECE.name]])}</b>`];
  if (module) lines.push(`<div>${escapeText(module)}</div>`);
  lines.push(`<div><i class="dot k-${KINDS[found[PIECE.kind]]}"></i>${KINDS[found[PIECE.kind]]}, ${bytesText(found[PIECE.bytes])}</div>`);
  lines.push(`<div>at address ${found[PIECE.offset].toLocaleString("en-US")}</div>`);
  lines.push(`<div>${timeText(lives)} from ${timeText(found[PIECE.start] * 1e3)}</div>`);
  showTip(lines.join(""), event.clientX, event.clientY);
});
for (const canvas of canvases) canvas.addEventListener("pointerleave", hideTip);
window.addEventListener("scroll", hideTip, {passive: true});
timeline.addEventListener("dblclick", (event) => {
  const at = eventAt(event.clientX, event.clientY);
  if (!at) return;
  const from = at.lane.start[at.i], to = at.lane.end[at.i], room = Math.max((to - from) * 0.6, LEAST / 2);
  show(from - room, to + room);
});

// ---- legend, tree, theme ----
const used = new Set(timelines.flatMap((t) => t.lanes.flatMap((lane) => lane.color)));
const LEGEND = [["fwd", "forward"], ["bwd", "backward"], ["upd", "update"], ["wait", "waiting"], ["gather", "gather"], ["reduce", "reduce"],
  ["p2p", "point to point"], ["h2d", "host to device"], ["d2h", "device to host"], ["file", "file"], ["host", "host"]];
document.getElementById("lanes").innerHTML = LEGEND.filter(([name]) => used.has(name))
  .map(([name, text]) => `<span><i class="dot" style="background:var(--${name})"></i>${text}</span>`).join("");

const treeRows = [...document.querySelectorAll("#modules tbody tr")];
function twist(row) {
  const open = row.dataset.open !== "1";
  row.dataset.open = open ? "1" : "0";
  const level = Number(row.dataset.level);
  let shutBelow = Infinity;
  for (let i = treeRows.indexOf(row) + 1; i < treeRows.length; i++) {
    const below = treeRows[i], depth = Number(below.dataset.level);
    if (depth <= level) break;
    if (depth <= shutBelow) shutBelow = Infinity;
    below.hidden = !open || depth > shutBelow;
    if (!below.hidden && below.dataset.open === "0") shutBelow = depth;
  }
}
for (const row of treeRows) {
  const button = row.querySelector("button.twist");
  if (button) button.addEventListener("click", () => twist(row));
}

function theme(name) {
  root.dataset.theme = name;
  readColors();
  draw();
}
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  theme(dark ? "light" : "dark");
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { readColors(); draw(); });
if (location.hash === "#dark" || location.hash === "#light") root.dataset.theme = location.hash.slice(1);
readColors();
new ResizeObserver(draw).observe(timeline);
draw();
root.dataset.ready = "1";
})();
