// The timeline: lanes over time, one step above the other on one scale; moving, zooming, what is under the pointer or the keys.
(() => {
const {data, root, colors, digits, timeText, bytesText, escapeText, prepare, ticks, showTip, hideTip} = Page;
if (!data.predicted) {
  root.dataset.ready = "1";
  return;
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

const TITLES = data.titles || ["Predicted", "Measured"];
const timelines = [readTimeline(data.predicted, TITLES[0]), readTimeline(data.measured, TITLES[1])].filter(Boolean);
const whole = Math.max(1, ...timelines.map((t) => t.span));
const view = {from: 0, to: whole};
const LANE = 24, TITLE = 22, AXIS = 34, GAP = 10;

const timeline = document.getElementById("timeline");
const gutter = () => (timeline.clientWidth < 560 ? 68 : 84);

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
  for (const phase of data.phases || []) {
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
  if (cursor.i >= 0) {
    const {y, lane} = laneRows[cursor.at];
    const x0 = Math.max(0, (lane.start[cursor.i] - view.from) * scale), x1 = Math.min(width - left, (lane.end[cursor.i] - view.from) * scale);
    g.strokeStyle = colors.ink;
    g.lineWidth = 2;
    if (x1 >= 0 && x0 <= width - left) g.strokeRect(left + x0, y - 1, Math.max(x1 - x0, 2), LANE - 4);
  }
}
function drawPath(g, left, width, scale) {
  const predicted = timelines[0];
  const rank = predicted.source.rank;
  const top = new Map(layout.rows.filter((row) => row.lane && row.timeline === predicted).map((row) => [row.lane.name, row.y]));
  g.fillStyle = colors.path;
  for (const piece of data.path || []) {
    const y = top.get(piece.lane === "launch" ? "compute" : piece.lane);
    if (y === undefined || (piece.rank !== rank && piece.lane === "compute")) continue;
    const x0 = Math.max(0, (piece.start_us * 1e3 - view.from) * scale), x1 = Math.min(width - left, (piece.end_us * 1e3 - view.from) * scale);
    if (x1 > x0) g.fillRect(left + x0, y + LANE - 6, Math.max(x1 - x0, 0.75), 2);
  }
}

let waiting = false;
function draw() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => {
    waiting = false;
    if (timeline.clientWidth <= gutter()) return;  // not shown
    drawTimeline();
    below.draw();
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
const below = memoryFigures({view, gutter, drawAxis, timeAt, timelines});
const canvases = [timeline, ...below.canvases];
const presets = data.presets || {};  // of a pipeline: its start and its end
for (const button of document.querySelectorAll("[data-zoom]")) {
  button.addEventListener("click", () => {
    const how = button.dataset.zoom;
    if (how === "all") show(0, whole);
    else if (how in presets) show(...presets[how]);
    else zoom(how === "in" ? 0.5 : 2);
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
    if (event.shiftKey && event.key.startsWith("Arrow")) return;  // these choose what a tip is about
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
function describe({row, lane, i}) {
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
  return lines.join("");
}
timeline.addEventListener("pointermove", (event) => {
  if (timeline.classList.contains("drag")) return;
  const at = eventAt(event.clientX, event.clientY);
  if (at) showTip(describe(at), event.clientX, event.clientY); else hideTip();
});
// Up and down choose a lane, Shift with left and right an event of it; Enter fills the view with it.
const laneRows = layout.rows.filter((row) => row.lane && row.lane.count);
let cursor = {at: 0, i: -1};
function choose(at, by) {
  const row = laneRows[at], lane = row.lane;
  let i = at === cursor.at && cursor.i >= 0 ? cursor.i + by : Math.min(firstAfter(lane, view.from), lane.count - 1);
  i = Math.min(Math.max(i, 0), lane.count - 1);
  cursor = {at, i};
  const length = view.to - view.from;
  if (lane.end[i] < view.from || lane.start[i] > view.to) show(lane.start[i] - length / 4, lane.start[i] + 3 * length / 4);
  const box = timeline.getBoundingClientRect(), left = gutter();
  const x = Math.max(0, (Math.max(lane.start[i], view.from) - view.from) / (view.to - view.from)) * (box.width - left);
  draw();
  showTip(describe({row, lane, i}), box.left + left + x, box.top + row.y + LANE - 14);
}
timeline.addEventListener("keydown", (event) => {
  const way = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
  if (way && laneRows.length && (way[0] || event.shiftKey)) {
    choose(cursor.i < 0 ? 0 : (cursor.at + way[0] + laneRows.length) % laneRows.length, way[1]);
  } else if (event.key === "Enter" && cursor.i >= 0) fill(laneRows[cursor.at].lane, cursor.i);
  else return;
  event.preventDefault();
});
timeline.addEventListener("blur", () => {
  cursor = {at: 0, i: -1};
  hideTip();
  draw();
});
for (const canvas of canvases) canvas.addEventListener("pointerleave", hideTip);
function fill(lane, i) {
  const from = lane.start[i], to = lane.end[i], room = Math.max((to - from) * 0.6, LEAST / 2);
  show(from - room, to + room);
}
timeline.addEventListener("dblclick", (event) => {
  const at = eventAt(event.clientX, event.clientY);
  if (at) fill(at.lane, at.i);
});

// ---- legend ----
const used = new Set(timelines.flatMap((t) => t.lanes.flatMap((lane) => lane.color)));
const LEGEND = [["fwd", "forward"], ["bwd", "backward"], ["upd", "update"], ["wait", "waiting"], ["gather", "gather"], ["reduce", "reduce"],
  ["p2p", "point to point"], ["h2d", "host to device"], ["d2h", "device to host"], ["file", "file"], ["host", "host"]];
document.getElementById("lanes").innerHTML = LEGEND.filter(([name]) => used.has(name))
  .map(([name, text]) => `<span><i class="dot" style="background:var(--${name})"></i>${text}</span>`).join("");

window.addEventListener("recolor", draw);
new ResizeObserver(draw).observe(timeline);
draw();
root.dataset.ready = "1";
})();
