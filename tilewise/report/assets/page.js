// Plays the films in #data. Nothing here computes attention: every number shown was recorded by Python, and is only
// added up (bytes) or looked up (everything else).
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const SIDE = 400; // of the grid, in the drawing's units
const RATES = [1, 3, 10, 30, 100, 300, 1000]; // steps a second
const STRIPS = { // where an array lies beside the grid; thin ones have one number a row
  left: ["Q", "dO"], right: ["O", "l", "m", "L", "delta", "dQ"], top: ["K", "V"], bottom: ["dK", "dV"],
};
const THIN = new Set(["l", "m", "L", "delta"]);
const MATRICES = new Set(["S", "P", "dP", "dS"]);
const OF_KEYS = new Set(["K", "V", "dK", "dV"]); // one row a key; the others have one a query

const choice = { algorithm: "flash1", direction: "forward", ...DATA.start };
let row = 1; // which of the chosen rows
let at = 0; // steps done
let playing = 0; // the animation frame, 0 when paused
let films = {}; // by algorithm, of the present choice
let film = null; // the one that is shown
let drawing = null;

// --- films ---

function open(algorithm) {
  const key = [choice.mask, choice.N, choice.d, choice.kib, algorithm, choice.direction].join("/");
  const packed = DATA.films[key];
  const { steps, places } = DATA.streams[packed.stream];
  const count = steps.length / 3;
  const kinds = packed.kinds.map(([op, names, kernel, loaded, stored, caption]) => ({
    op, names, kernel, loaded, stored, caption: DATA.captions[caption],
    bytes: sum(loaded) + sum(stored),
  }));
  const bytes = new Float64Array(count + 1); // moved after so many steps
  const kernelStart = new Int32Array(count + 1);
  for (let s = 0; s < count; s++) {
    const kind = kinds[steps[3 * s]];
    bytes[s + 1] = bytes[s] + kind.bytes;
    kernelStart[s + 1] = s && kind.kernel === kinds[steps[3 * s - 3]].kernel ? kernelStart[s] : s;
  }
  return {
    algorithm, count, kinds, bytes, kernelStart, rows: packed.rows, chips: packed.chips, model: packed.model,
    peak: packed.peak, blocks: packed.blocks, places,
    kind: (s) => kinds[steps[3 * s]],
    placeNumber: (s) => steps[3 * s + 1],
    place: (s) => places.slice(4 * steps[3 * s + 1], 4 * steps[3 * s + 1] + 4),
    chip: (s) => packed.chips[steps[3 * s + 2]],
  };
}

const sum = (list) => list.reduce((a, b) => a + b, 0);

/** The steps that another algorithm has done when the shown one has done `at`: the same fraction. */
const together = (other) => (other === film ? at : Math.round((at / film.count) * other.count));

function arraysOf(one, until) {
  const total = {};
  for (let s = 0; s < until; s++) {
    const kind = one.kind(s);
    kind.names.forEach((name, n) => { total[name] = (total[name] || 0) + kind.loaded[n] + kind.stored[n]; });
  }
  return total;
}

// --- words ---

function size(bytes) {
  if (bytes < 1000) return `${bytes} B`;
  const [value, unit] = bytes < 999500 ? [bytes / 1e3, "kB"] : [bytes / 1e6, "MB"];
  return `${value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0)} ${unit}`;
}
const kib = (bytes) => `${bytes < 10240 ? Math.round(bytes / 102.4) / 10 : Math.round(bytes / 1024)} KiB`;
const number = (x) => (x === null ? "−∞" : String(Number(x.toPrecision(3))).replace("-", "−"));

/** Text with _i, _j, _ij, _old, _new as subscripts. */
function rich(text) {
  return text.split(/(_(?:ij|i|j|old|new)\b)/).map((part) => {
    if (!/^_(ij|i|j|old|new)$/.test(part)) return part;
    const sub = document.createElement("sub");
    sub.textContent = part.slice(1);
    return sub;
  });
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function shape(parent, tag, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent.append(made);
  return made;
}

function range(place, name) {
  const [q0, q1, k0, k1] = place;
  if (MATRICES.has(name)) return "";
  const keys = OF_KEYS.has(name);
  const [from, to] = keys ? [k0, k1] : [q0, q1];
  return from < 0 ? "" : `${keys ? "keys" : "queries"} ${from}–${to - 1}`;
}

// --- the grid ---

function draw() {
  const svg = $("grid");
  svg.replaceChildren();
  const names = new Set(film.kinds.filter((kind) => kind.bytes).flatMap((kind) => kind.names));
  const forward = choice.direction === "forward";
  const lies = { left: [], right: [], top: [], bottom: [] };
  for (const [where, list] of Object.entries(STRIPS)) {
    for (const name of list) {
      const result = forward || name.startsWith("d") || where !== "right"; // what a backward reads lies left
      if (names.has(name)) lies[where === "right" && !result ? "left" : where].push(name);
    }
  }
  const width = (name) => (THIN.has(name) ? 9 : 20);
  const gap = 16;
  const extent = (list) => list.reduce((total, name) => total + width(name) + gap, 0);
  const left = extent(lies.left) + 6, top = extent(lies.top) + 20;
  const total = { w: left + SIDE + extent(lies.right) + 12, h: top + SIDE + extent(lies.bottom) + 8 };
  svg.setAttribute("viewBox", `0 0 ${total.w} ${total.h}`);

  const defs = shape(svg, "defs", {});
  const pattern = shape(defs, "pattern", { id: "hatch", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  shape(pattern, "rect", { width: 1.4, height: 7, style: "fill: var(--hatch)" });

  const scale = SIDE / choice.N;
  const area = shape(svg, "g", { transform: `translate(${left} ${top})`, class: film.algorithm === "standard" ? "hbm" : "" });
  shape(area, "rect", { class: "back", width: SIDE, height: SIDE });
  shape(area, "rect", { width: SIDE, height: SIDE, fill: "url(#hatch)" });
  if (film.algorithm !== "standard" || choice.mask !== "block-sparse") {
    for (const polygon of DATA.visible[`${choice.mask}/${choice.N}`]) {
      shape(area, "polygon", { class: "mask", points: polygon.map(([x, y]) => `${x * scale},${y * scale}`).join(" ") });
    }
  } else shape(area, "rect", { class: "mask", width: SIDE, height: SIDE });
  const tiles = [];
  for (let n = 0; n < film.places.length / 4; n++) {
    const [q0, q1, k0, k1] = film.places.slice(4 * n, 4 * n + 4);
    const later = film.algorithm === "standard" ? " later" : "";
    tiles.push(q0 < 0 || k0 < 0 ? null : shape(area, "rect", {
      class: `tile${later}`, x: k0 * scale, y: q0 * scale, width: (k1 - k0) * scale, height: (q1 - q0) * scale, rx: 1.5,
    }));
  }
  shape(area, "rect", { class: film.algorithm === "standard" ? "frame hbm" : "frame", width: SIDE, height: SIDE });
  const now = shape(area, "rect", { class: "now", rx: 1.5 });
  const line = shape(area, "line", { class: "row", x1: -left + 4, x2: total.w - left - 4 });

  const strips = {};
  const place = (name, x, y, w, h, tx, ty, anchor) => {
    shape(svg, "rect", { class: "strip", x, y, width: w, height: h, rx: 2 });
    const mark = shape(svg, "rect", { class: "mark", x, y, width: w, height: h, rx: 2, visibility: "hidden" });
    const label = shape(svg, "text", { x: tx, y: ty, "text-anchor": anchor });
    label.textContent = name === "delta" ? "δ" : name;
    strips[name] = { mark, label, x, y, w, h, across: h < w };
  };
  let x = 4;
  for (const name of lies.left) {
    place(name, x, top, width(name), SIDE, x + width(name) / 2, top - 7, "middle");
    x += width(name) + gap;
  }
  x = left + SIDE + gap;
  for (const name of lies.right) {
    place(name, x, top, width(name), SIDE, x + width(name) / 2, top - 7, "middle");
    x += width(name) + gap;
  }
  let y = 4;
  for (const name of lies.top) {
    place(name, left, y, SIDE, width(name), left - 7, y + width(name) / 2 + 5, "end");
    y += width(name) + gap;
  }
  y = top + SIDE + gap;
  for (const name of lies.bottom) {
    place(name, left, y, SIDE, width(name), left - 7, y + width(name) / 2 + 5, "end");
    y += width(name) + gap;
  }
  drawing = { svg, tiles, now, line, strips, scale, state: new Int8Array(tiles.length) };
}

function showGrid() {
  const { tiles, now, line, strips, scale, state } = drawing;
  const wanted = new Int8Array(tiles.length);
  for (let s = film.kernelStart[at]; s < at; s++) wanted[film.placeNumber(s)] = 1;
  tiles.forEach((tile, n) => {
    if (tile && wanted[n] !== state[n]) tile.classList.toggle("done", Boolean(wanted[n]));
  });
  drawing.state = wanted;

  const kind = at ? film.kind(at - 1) : null;
  const place = at ? film.place(at - 1) : [-1, -1, -1, -1];
  const [q0, q1, k0, k1] = place;
  const inside = kind && q0 >= 0 && k0 >= 0;
  const matrix = kind && kind.names.some((name) => MATRICES.has(name)) && kind.op !== "compute";
  now.setAttribute("visibility", inside ? "visible" : "hidden");
  now.setAttribute("class", `now ${matrix ? kind.op : ""}`);
  const box = inside ? [k0, q0, k1 - k0, q1 - q0] : [0, 0, 0, 0];
  ["x", "y", "width", "height"].forEach((name, n) => now.setAttribute(name, box[n] * scale));
  for (const [name, strip] of Object.entries(strips)) {
    const hot = kind && kind.names.includes(name) && kind.op !== "compute";
    const [from, to] = OF_KEYS.has(name) ? [k0, k1] : [q0, q1];
    const whole = hot && kind.op === "fill";
    strip.label.setAttribute("class", hot ? "hot" : "");
    strip.mark.setAttribute("class", `mark ${hot ? kind.op : ""}`);
    const [a, b] = whole ? [0, choice.N] : from < 0 ? [0, 0] : [from, to];
    strip.mark.setAttribute("visibility", b > a ? "visible" : "hidden");
    strip.mark.setAttribute(strip.across ? "x" : "y", (strip.across ? strip.x : strip.y) + a * scale);
    strip.mark.setAttribute(strip.across ? "width" : "height", (b - a) * scale);
  }
  const y = (DATA.rows[choice.N][row] + 0.5) * scale;
  line.setAttribute("y1", y);
  line.setAttribute("y2", y);
}

// --- the panels ---

function showSentence() {
  const sentence = $("sentence");
  const kind = at ? film.kind(at - 1) : null;
  sentence.dataset.op = kind ? kind.op : "";
  if (!kind) {
    sentence.replaceChildren("Ready. Press Space to play, → for one step.");
    $("reason").textContent = film.algorithm === "standard" && choice.mask === "block-sparse"
      ? "Standard attention knows no block-sparse form: here it computes all pairs." : "";
  } else {
    const where = [...new Set(kind.names.map((name) => range(film.place(at - 1), name)).filter(Boolean))].join(", ");
    const cost = kind.bytes ? size(kind.bytes) : "nothing crosses";
    sentence.replaceChildren(...rich(kind.caption[0]), element("span", { class: "size" }, `  ${where && kind.op !== "compute" ? `(${where}) ` : ""}· ${cost}`));
    $("reason").replaceChildren(...rich(kind.caption[1]));
  }
  $("hidden-note").textContent = film.algorithm === "standard" ? "masked, but computed and moved all the same" : "masked: no tile, no bytes";
  const [rows, keys] = film.blocks;
  const kernels = [...new Set(film.kinds.map((one) => one.kernel))];
  const kernel = kind ? kind.kernel : "";
  const n = kernels.indexOf(kernel) + 1;
  const named = DATA.kernels[kernel] || "";
  const outer = film.algorithm === "flash2" && choice.direction === "forward" ? "outer loop down the queries, inner along the keys"
    : "outer loop along the keys, inner down the queries";
  $("loops").textContent = film.algorithm === "standard"
    ? `tiles of ${rows} × ${keys}` + (kind ? `; kernel ${n} of ${kernels.length}: ${named}` : `; ${kernels.length} kernels, each over all of it`)
    : `tiles of ${rows} × ${keys}; ${kernel === "delta" ? named : outer}`;
}

const HUES = { Q: 212, K: 28, V: 48, O: 160, S: 270, P: 290, dP: 310, dS: 330, l: 190, m: 175, L: 185, delta: 200, dQ: 232, dK: 12, dV: 65, dO: 140 };
const colour = (name) => `hsl(${HUES[name.split("_")[0]] ?? 0} 55% 58%)`;

function showChip() {
  const held = at ? film.chip(at - 1) : [];
  const M = choice.kib * 1024;
  const used = sum(held.map(([, bytes]) => bytes));
  $("sram-total").textContent = `${kib(used)} of M = ${choice.kib} KiB; at most ${kib(film.peak)}`;
  $("sram-bar").setAttribute("aria-label", `${Math.round((100 * used) / M)} % of the chip is in use`);
  $("sram-bar").replaceChildren(...held.map(([name, bytes]) => element("span", {
    style: `width:${(100 * bytes) / M}%;background:${colour(name)}`, title: `${name}: ${bytes} bytes` })));
  $("sram").replaceChildren(...held.map(([name, bytes]) => {
    const label = element("span", {}, element("i", { style: `background:${colour(name)}` }), ...rich(name));
    return element("li", {}, label, element("span", { class: "size" }, kib(bytes)));
  }));
}

function showRow() {
  const chosen = DATA.rows[choice.N][row];
  const states = film.rows[chosen];
  const body = $("row-body");
  const forward = choice.direction === "forward";
  const what = forward ? "O" : "dQ";
  if (!states.length) {
    $("row-note").textContent = "";
    body.replaceChildren(element("p", {}, forward
      ? "Here a row’s softmax is made in one go, once all its N scores lie in HBM: there is nothing to rescale. FlashAttention sees the keys tile by tile, and must correct what it has summed whenever a larger score turns up."
      : "Here dQ’s row is one product of dS, which lies in HBM, with K. FlashAttention makes P and dS again, tile by tile, and sums."));
    return;
  }
  const seen = states.filter(([step]) => step < at);
  const current = seen.at(-1), before = seen.at(-2);
  $("row-note").textContent = `query ${chosen}; ${seen.length} of ${states.length} updates`;
  const divided = Boolean(current) && current[2] === null; // values of one scale share one axis
  const limit = Math.max(...states.filter((one) => (one[2] === null) === divided).flatMap((one) => one[4].map(Math.abs)), 1e-9);
  const list = element("dl", { class: "state" });
  const line = (name, ...text) => list.append(element("dt", {}, name), element("dd", {}, ...text));
  const change = (n) => (current ? [element("span", { class: "old" }, before ? `${number(before[n])} → ` : `${n === 2 ? "0" : "−∞"} → `), number(current[n])] : ["…"]);
  const last = divided; // O, divided by l; in a backward always
  let note = "Nothing of this row yet.";
  if (forward) {
    line("m, the maximum", ...(last ? [before ? number(before[1]) : "−∞"] : change(1)));
    line("l, the sum", ...(last ? [before ? number(before[2]) : "0"] : change(2)));
    line("what was there × ", last ? "1 / l" : current ? number(current[3]) : "…");
    if (last) note = "The row is done: O was divided by l, once, and stored.";
    else if (current && current[1] === null) note = "All keys of this tile are masked for this row.";
    else if (current && !before) note = "The first tile: m is its largest score.";
    else if (current) note = current[3] === 1 ? "No larger score in this tile: m stays, nothing is rescaled." : `m rose, so all that was summed before is multiplied by exp(m_old − m_new) = ${number(current[3])}.`;
  } else if (current) {
    note = current === states.at(-1) ? "All key tiles have added their part: this is dQ." : "Each key tile makes P again from Q, K and the row’s statistics, and adds its part.";
  }
  const shown = current ? current[4] : [0, 0, 0, 0];
  const values = element("div", { class: "values" });
  shown.forEach((value, n) => {
    const half = (50 * Math.abs(value)) / limit;
    const bar = element("i", { style: `left:${value < 0 ? 50 - half : 50}%;width:${half}%` });
    values.append(element("span", {}, `${what}[${n}]`), element("span", { class: "axis" }, bar), element("span", { class: "num" }, number(value)));
  });
  const kept = film.algorithm === "flash2" ? "not yet divided by l" : "already divided by l";
  body.replaceChildren(...(forward ? [list] : []), element("p", {}, ...rich(note)), values,
    element("p", { class: "num" }, forward ? `The first four of ${choice.d} components${last ? "" : `, ${kept}`}.` : `The first four of ${choice.d} components.`));
}

function showBytes() {
  const most = Math.max(...Object.values(films).map((one) => one.model));
  for (const one of Object.values(films)) {
    const until = together(one), bytes = one.bytes[until];
    const { fill, mark, count } = bars[one.algorithm];
    fill.style.width = `${(100 * bytes) / most}%`;
    mark.style.left = `calc(${(100 * one.model) / most}% - 2px)`;
    const equal = bytes === one.model;
    const note = until < one.count ? element("small", {}, `of ${size(one.model)}`)
      : element("small", { class: equal ? "equal" : "unequal" }, equal ? `= io_model: ${one.model.toLocaleString("en")} B ✓` : `≠ io_model: ${one.model.toLocaleString("en")} B`);
    count.replaceChildren(size(bytes), note);
    count.dataset.bytes = bytes;
  }
  const times = (one) => (films.standard.bytes[together(films.standard)] / Math.max(one.bytes[together(one)], 1)).toFixed(1);
  const totals = Object.fromEntries(Object.values(films).map((one) => [one.algorithm, arraysOf(one, together(one))]));
  const matrices = sum([...MATRICES].map((name) => totals.standard[name] || 0));
  $("verdict").textContent = at === film.count
    ? `Standard attention moved ${times(films.flash1)}× the bytes of FlashAttention-1 and ${times(films.flash2)}× those of FlashAttention-2: ${size(matrices)} of its ${size(films.standard.model)} are N × N matrices.`
    : "Bold are the N × N matrices. In FlashAttention no such array exists in HBM.";
  const names = [...new Set(Object.values(films).flatMap((one) => one.kinds.flatMap((kind) => kind.names)))]
    .filter((name) => Object.values(films).some((one) => one.kinds.some((kind) => kind.bytes && kind.names.includes(name))));
  names.sort((a, b) => ORDER.indexOf(a) - ORDER.indexOf(b));
  const head = element("tr", {}, element("th", { scope: "col" }, ""), ...Object.keys(films).map((one) => element("th", { scope: "col" }, SHORT[one])));
  $("arrays").tHead.replaceChildren(head);
  $("arrays").tBodies[0].replaceChildren(...names.map((name) => element("tr", MATRICES.has(name) ? { class: "big" } : {},
    element("th", { scope: "row" }, name + (MATRICES.has(name) ? " (N × N)" : "")),
    ...Object.keys(films).map((one) => {
      const uses = films[one].kinds.some((kind) => kind.bytes && kind.names.includes(name) && sum(kind.loaded) + sum(kind.stored));
      return uses ? element("td", {}, size(totals[one][name] || 0)) : element("td", { class: "none" }, "–");
    }))));
}
const ORDER = ["S", "P", "dP", "dS", "Q", "K", "V", "O", "dO", "dQ", "dK", "dV", "l", "m", "L", "delta"];
const SHORT = { standard: "Standard", flash1: "FA-1", flash2: "FA-2" };
const bars = {};

function show() {
  showGrid();
  showSentence();
  showChip();
  showRow();
  showBytes();
  $("time").value = at;
  $("time").setAttribute("aria-valuetext", `step ${at} of ${film.count}`);
  $("where").textContent = `${at} / ${film.count}`;
}

// --- choosing ---

function options(name, values, words) {
  $(name).replaceChildren(...values.map((value) => {
    const input = element("input", { type: "radio", name, value });
    input.checked = String(choice[name]) === String(value);
    input.addEventListener("change", () => select({ [name]: typeof choice[name] === "number" ? Number(value) : value }));
    return element("label", {}, input, element("span", {}, words(value)));
  }));
}

const distinct = (list) => [...new Set(list)];

/** Change what is shown. What was not recorded is not offered: sizes fall back to the nearest that was. */
function select(wanted) {
  const fraction = film && wanted.algorithm && Object.keys(wanted).length === 1 ? at / film.count : 0;
  Object.assign(choice, wanted);
  let left = DATA.scenarios.filter((one) => one.mask === choice.mask);
  const offered = {};
  for (const name of ["N", "d", "kib"]) {
    offered[name] = distinct(left.map((one) => one[name]));
    if (!offered[name].includes(choice[name])) choice[name] = offered[name][0];
    left = left.filter((one) => one[name] === choice[name]);
  }
  options("algorithm", Object.keys(DATA.algorithms), (value) => DATA.algorithms[value]);
  options("direction", DATA.directions, (value) => value);
  options("mask", DATA.masks, (value) => value);
  options("N", offered.N, String);
  options("d", offered.d, String);
  options("kib", offered.kib, (value) => `${value} KiB`);
  document.body.dataset.own = choice.algorithm;
  films = Object.fromEntries(Object.keys(DATA.algorithms).map((name) => [name, open(name)]));
  film = films[choice.algorithm];
  at = Math.round(fraction * film.count);
  $("time").max = film.count;
  chooseRow(row);
  draw();
  show();
}

function chooseRow(n) {
  row = n;
  $("row").replaceChildren(...DATA.rows[choice.N].map((query, index) => {
    const input = element("input", { type: "radio", name: "query", value: query });
    input.checked = index === row;
    input.addEventListener("change", () => { chooseRow(index); show(); });
    return element("label", {}, input, element("span", {}, `query ${query}`));
  }));
}

// --- playing ---

function seek(step) {
  at = Math.max(0, Math.min(film.count, step));
  show();
}

function pause() {
  cancelAnimationFrame(playing);
  playing = 0;
  $("play").textContent = "▶ Play";
  $("play").setAttribute("aria-label", "Play");
  $("sentence").setAttribute("aria-live", "polite");
}

function play() {
  if (at === film.count) at = 0;
  let last = performance.now(), due = 0;
  const frame = (now) => {
    due += ((now - last) / 1000) * RATES[$("speed").value];
    last = now;
    const steps = Math.floor(due);
    if (steps) {
      due -= steps;
      seek(at + steps);
    }
    if (at >= film.count) pause();
    else playing = requestAnimationFrame(frame);
  };
  $("play").textContent = "❚❚ Pause";
  $("play").setAttribute("aria-label", "Pause");
  $("sentence").setAttribute("aria-live", "off"); // a sentence a step is for the eye, not for a voice
  playing = requestAnimationFrame(frame);
}

/** The next (1) or previous (-1) step at which another tile is worked on. */
function tile(direction) {
  let s = at;
  const here = at ? film.placeNumber(at - 1) : -1;
  const inside = (n) => film.place(n - 1)[0] >= 0 && film.place(n - 1)[2] >= 0;
  do s += direction; while (s > 0 && s < film.count && (film.placeNumber(s - 1) === here || !inside(s)));
  pause();
  seek(s);
}

const go = (step) => { pause(); seek(step); };
const turn = (list, value) => list[(list.indexOf(value) + 1) % list.length];

function theme() {
  const dark = document.documentElement.dataset.theme
    ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
}

function speed(change) {
  $("speed").value = Number($("speed").value) + change;
  rate();
}
function rate() {
  const text = `${RATES[$("speed").value]} step${RATES[$("speed").value] > 1 ? "s" : ""}/s`;
  $("rate").textContent = text;
  $("speed").setAttribute("aria-valuetext", text);
}

const KEYS = {
  " ": () => (playing ? pause() : play()),
  ArrowRight: (event) => (event.shiftKey ? tile(1) : go(at + 1)),
  ArrowLeft: (event) => (event.shiftKey ? tile(-1) : go(at - 1)),
  Home: () => go(0),
  End: () => go(film.count),
  "+": () => speed(1), "=": () => speed(1), "-": () => speed(-1),
  1: () => select({ algorithm: "standard" }), 2: () => select({ algorithm: "flash1" }), 3: () => select({ algorithm: "flash2" }),
  b: () => select({ direction: turn(DATA.directions, choice.direction) }),
  m: () => select({ mask: turn(DATA.masks, choice.mask) }),
  r: () => { chooseRow((row + 1) % DATA.rows[choice.N].length); show(); },
  t: theme,
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const tag = event.target.tagName, type = event.target.type;
  if (tag === "INPUT" && type === "radio" && event.key.startsWith("Arrow")) return; // they move within the group
  if (tag === "INPUT" && type === "range" && event.target.id === "speed" && event.key !== " ") return;
  if (tag === "BUTTON" && event.key === " ") return; // it presses the button
  const act = KEYS[event.key];
  if (!act) return;
  event.preventDefault();
  act(event);
});

for (const [name, title] of Object.entries(DATA.algorithms)) {
  const fill = element("i"), mark = element("b", { title: "in closed form" });
  const count = element("div", { class: "count", id: `count-${name}` });
  $("bars").append(element("div", { class: "bar", "data-own": name }, element("span", { class: "name" }, title),
    element("div", { class: "track" }, fill, mark), count));
  bars[name] = { fill, mark, count };
}
$("play").addEventListener("click", () => (playing ? pause() : play()));
$("step").addEventListener("click", () => go(at + 1));
$("back").addEventListener("click", () => go(at - 1));
$("home").addEventListener("click", () => go(0));
$("end").addEventListener("click", () => go(film.count));
$("time").addEventListener("input", (event) => go(Number(event.target.value)));
$("speed").addEventListener("input", rate);
$("theme").addEventListener("click", theme);
$("controls").addEventListener("submit", (event) => event.preventDefault());
$("version").textContent = `Written by tilewise ${DATA.version}: tilewise explain --html.`;
rate();
select({});
