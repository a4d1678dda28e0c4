// Memory by kind, and the planned addresses of the arena, over the stretch of time that the timeline shows.
// `shared` is the timeline's: {view, gutter, drawAxis, timeAt, timelines}. Gives {canvases, draw}.
function memoryFigures({view, gutter, drawAxis, timeAt, timelines}) {
const {data, colors, KINDS, timeText, bytesText, escapeText, prepare, showTip, hideTip} = Page;
const memory = document.getElementById("memory");  // null on the page of a plan
const arena = document.getElementById("arena");  // null without one

// ---- memory: stacked kinds as steps over the same stretch of time ----
const HEIGHT = 220, AXIS_ROOM = 18;
const samples = data.memory || {time_us: [], bytes: []};
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

function memoryTip(time) {
  const i = sampleAt(time);
  if (i < 0 || time > data.predicted.span_ns) return "";
  const row = samples.bytes[i];
  const cells = kindsShown.filter((k) => row[k] > 0).sort((a, b) => row[b] - row[a])
    .map((k) => `<tr><td><i class="dot k-${KINDS[k]}"></i>${KINDS[k]}</td><td>${bytesText(row[k])}</td></tr>`);
  return `<b>${bytesText(row.reduce((a, b) => a + b, 0))}</b> at ${timeText(time)}<table>${cells.join("")}</table>`;
}
memory?.addEventListener("pointermove", (event) => {
  if (memory.classList.contains("drag")) return;
  const html = memoryTip(timeAt(memory, event.clientX));
  if (html) showTip(html, event.clientX, event.clientY); else hideTip();
});
function arenaTip(found) {
  const module = data.arena.names[found[PIECE.module]], lives = (found[PIECE.end] - found[PIECE.start]) * 1e3;
  const lines = [`<b>${escapeText(data.arena.names[found[PIECE.name]])}</b>`];
  if (module) lines.push(`<div>${escapeText(module)}</div>`);
  lines.push(`<div><i class="dot k-${KINDS[found[PIECE.kind]]}"></i>${KINDS[found[PIECE.kind]]}, ${bytesText(found[PIECE.bytes])}</div>`);
  lines.push(`<div>at address ${found[PIECE.offset].toLocaleString("en-US")}</div>`);
  lines.push(`<div>${timeText(lives)} from ${timeText(found[PIECE.start] * 1e3)}</div>`);
  return lines.join("");
}
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
  showTip(arenaTip(found), event.clientX, event.clientY);
});
// Shift and arrows: a moment of the memory, a box of the arena.
let moment = 0, box = -1;
memory?.addEventListener("keydown", (event) => {
  if (!event.shiftKey || !event.key.startsWith("Arrow")) return;
  const by = (view.to - view.from) / 50 * (event.key === "ArrowLeft" ? -1 : 1);
  moment = Math.min(Math.max(moment + by, view.from), Math.min(view.to, data.predicted.span_ns));
  const place = memory.getBoundingClientRect(), left = gutter();
  showTip(memoryTip(moment), place.left + left + (moment - view.from) / (view.to - view.from) * (place.width - left), place.top + 40);
  event.preventDefault();
});
arena?.addEventListener("keydown", (event) => {
  if (!event.shiftKey || !event.key.startsWith("Arrow") || !pieces.length) return;
  box = (box + (event.key === "ArrowLeft" ? -1 : 1) + pieces.length) % pieces.length;
  const place = arena.getBoundingClientRect(), {left, bottom, scale, up} = arenaPlace(place.width), p = pieces[box];
  const x = left + Math.min(Math.max((p[PIECE.start] * 1e3 - view.from) * scale, 0), place.width - left);
  showTip(arenaTip(p), place.left + x, place.top + bottom - p[PIECE.offset] * up - 20);
  event.preventDefault();
});
return {canvases: [memory, arena].filter(Boolean), draw() {
  if (memory) drawMemory();
  if (arena) drawArena();
}};
}
