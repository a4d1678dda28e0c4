"use strict";
// What every page has: numbers, colours, tips, words that are explained, tables that scroll, the tree of modules. Other scripts use Page.
const Page = (() => {
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const root = document.documentElement;
const KINDS = data.memory ? data.memory.kinds : [];
const colors = {};

function readColors() {
  const style = getComputedStyle(root);
  const names = ["card", "ink", "quiet", "line", "track", "accent", "good", "bad", "path", "fwd", "bwd", "upd", "gather", "reduce", "p2p", "h2d",
    "d2h", "file", "host", "wait", ...KINDS];
  for (const name of names) colors[name] = style.getPropertyValue("--" + name).trim();
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

// ---- canvases ----
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
// ---- tips: of a place on the page, or of an element that has the focus ----
function hideTip() { tip.hidden = true; }
function showTip(html, x, y) {
  tip.innerHTML = html;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(8, Math.min(x + 14, window.innerWidth - box.width - 8)) + "px";
  tip.style.top = (y + 18 + box.height > window.innerHeight ? Math.max(8, y - box.height - 12) : y + 18) + "px";
}
function tipOf(element, html) {
  const show = () => {
    const box = element.getBoundingClientRect();
    showTip(html, Math.min(box.left, window.innerWidth - 60), box.bottom - 12);
  };
  element.placeTip = show;
  for (const name of ["pointerenter", "focus", "click"]) element.addEventListener(name, show);
  for (const name of ["pointerleave", "blur"]) element.addEventListener(name, hideTip);
}
// What has the focus keeps its tip: the focus itself scrolls the page.
window.addEventListener("scroll", () => {
  const focused = document.activeElement;
  if (!tip.hidden && focused.placeTip) focused.placeTip(); else hideTip();
}, {passive: true});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
for (const term of document.querySelectorAll("dfn")) {
  const [field, here] = data.glossary[term.dataset.term];
  tipOf(term, `<b>${escapeText(term.dataset.term)}</b><div>${escapeText(here)}</div><div>In the field: ${escapeText(field)}</div>`);
}
for (const point of document.querySelectorAll("[data-tip]")) tipOf(point, escapeText(point.dataset.tip));

// ---- tables wider than the page: a mark at the edge where there is more, and the arrow keys ----
for (const box of document.querySelectorAll(".scroll")) {
  const mark = () => {
    const more = box.scrollWidth - box.clientWidth;
    box.parentElement.classList.toggle("more", box.scrollLeft < more - 1);
    if (more > 1) box.tabIndex = 0; else box.removeAttribute("tabindex");
  };
  box.addEventListener("scroll", mark, {passive: true});
  new ResizeObserver(mark).observe(box);
}

// On a phone each cell says which column it is of.
for (const table of document.querySelectorAll("main table")) {
  const heads = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  for (const row of table.tBodies[0].rows) {
    [...row.cells].forEach((cell, i) => { if (heads[i] && (i > 0 || /^[\d\u2013-]+$/.test(cell.textContent))) cell.dataset.head = heads[i]; });
  }
}

// ---- tree, theme ----
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

function dark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}
function recolor() {
  readColors();
  window.dispatchEvent(new Event("recolor"));
}
document.getElementById("theme").addEventListener("click", () => {
  root.dataset.theme = dark() ? "light" : "dark";
  recolor();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolor);
if (location.hash === "#dark" || location.hash === "#light") root.dataset.theme = location.hash.slice(1);
readColors();
return {data, root, colors, KINDS, digits, timeText, bytesText, escapeText, prepare, ticks, showTip, hideTip};
})();
