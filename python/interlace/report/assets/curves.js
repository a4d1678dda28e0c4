// Curves over the steps of a run, or of two: the pointer, or the arrow keys, tell the values of a step.
(() => {
const {data, colors, bytesText, timeText, prepare, ticks, escapeText, showTip, hideTip} = Page;
const HEIGHT = 190, TOP = 12, BOTTOM = 22, INKS = ["accent", "bad"];
const FORMS = {
  seconds: (v) => timeText(v * 1e9), memory_bytes: bytesText, lr: (v) => v.toExponential(2),
  tokens_per_second: (v) => Math.round(v).toLocaleString("en-US"),
};
for (const canvas of document.querySelectorAll("canvas.curve")) {
  const {name, runs} = data.curves[Number(canvas.dataset.curve)];
  const form = FORMS[name] || ((v) => v.toPrecision(4));
  const steps = runs.flatMap((run) => run.steps), values = runs.flatMap((run) => run.values);
  const first = Math.min(...steps), last = Math.max(...steps, first + 1);
  let low = Math.min(...values), high = Math.max(...values);
  if (name === "memory_bytes" || name === "seconds" || name === "tokens_per_second") low = 0;
  if (high <= low) high = low + (Math.abs(low) || 1) * 0.1;
  let chosen = null;
  const left = () => (canvas.clientWidth < 420 ? 62 : 78);
  const x = (step) => left() + (step - first) / (last - first) * (canvas.clientWidth - left() - 8);
  const y = (value) => HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM);
  function draw() {
    if (canvas.clientWidth <= left()) return;
    const {g, width} = prepare(canvas, HEIGHT);
    g.font = "12px system-ui, sans-serif";
    const rows = ticks(low, high, 330);
    for (const value of rows.out) {
      g.strokeStyle = colors.line;
      g.beginPath();
      g.moveTo(left(), Math.round(y(value)) + 0.5);
      g.lineTo(width, Math.round(y(value)) + 0.5);
      g.stroke();
      g.fillStyle = colors.quiet;
      const text = FORMS[name] ? form(value) : String(Number(value.toPrecision(6)));
      g.fillText(text, left() - 8 - g.measureText(text).width, Math.max(y(value), 8));
    }
    let free = 0;
    for (const step of ticks(first, last, width - left()).out.filter((s) => Number.isInteger(s))) {
      const text = step.toLocaleString("en-US"), wide = g.measureText(text).width, at = Math.min(x(step) - wide / 2, width - wide);
      if (at < free) continue;
      g.fillText(text, at, HEIGHT - 8);
      free = at + wide + 8;
    }
    runs.forEach((run, r) => {
      g.strokeStyle = g.fillStyle = colors[INKS[r]];
      g.lineWidth = 1.5;
      g.beginPath();
      run.steps.forEach((step, i) => g.lineTo(x(step), y(run.values[i])));
      g.stroke();
      if (run.steps.length <= 24) for (let i = 0; i < run.steps.length; i++) dot(g, run, i, 2.5);
      if (chosen !== null) dot(g, run, nearest(run, chosen), 4);
    });
    g.lineWidth = 1;
  }
  function dot(g, run, i, radius) {
    g.beginPath();
    g.arc(x(run.steps[i]), y(run.values[i]), radius, 0, 2 * Math.PI);
    g.fill();
  }
  function nearest(run, step) {
    let best = 0;
    run.steps.forEach((each, i) => { if (Math.abs(each - step) < Math.abs(run.steps[best] - step)) best = i; });
    return best;
  }
  function tell(step) {
    chosen = step;
    draw();
    const lines = runs.map((run) => {
      const i = nearest(run, step);
      return `<div>${run.label ? escapeText(run.label) + ": " : ""}<b>${form(run.values[i])}</b> at step ${run.steps[i].toLocaleString("en-US")}</div>`;
    });
    const box = canvas.getBoundingClientRect();
    showTip(lines.join(""), box.left + x(step), box.top + 30);
  }
  function quiet() {
    chosen = null;
    hideTip();
    draw();
  }
  canvas.addEventListener("pointermove", (event) => {
    const at = (event.clientX - canvas.getBoundingClientRect().left - left()) / (canvas.clientWidth - left() - 8);
    tell(first + Math.min(Math.max(at, 0), 1) * (last - first));
  });
  canvas.addEventListener("keydown", (event) => {
    const all = runs[0].steps, by = {ArrowLeft: -1, ArrowRight: 1, Home: -all.length, End: all.length}[event.key];
    if (by === undefined) return;
    const from = chosen === null ? (by > 0 ? -1 : all.length) : nearest(runs[0], chosen);
    tell(all[Math.min(Math.max(from + by, 0), all.length - 1)]);
    event.preventDefault();
  });
  canvas.addEventListener("pointerleave", quiet);
  canvas.addEventListener("blur", quiet);
  window.addEventListener("recolor", draw);
  new ResizeObserver(draw).observe(canvas);
}
})();
