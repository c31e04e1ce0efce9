const {nodes} = data;
const COLUMNS = {input: 0, forward: 1, backward: 2, between: 3, update: 3, output: 3};
const WIDTH = 250, LEAF = 20, FOLDED = 28, HEAD = 24, PAD = 7, GAP = 4, BETWEEN = 110;
document.body.className = "graph";
$("title").textContent = document.title;
const {operations, peak: most} = data.facts;
$("facts").textContent = `${operations.toLocaleString("en")} operations, at most ${bytes(most)}`;
const KEYS = {forward: "forward", backward: "backward", update: "optimizer", boundary: "boundary", input: "inputs, state"};
for (const name in KEYS) $("keys").append(element("span", {class: "key", style: "margin-right:9px"}, element("i", {style: `background:var(--${name})`}), KEYS[name]));

// Groups: of each phase, consecutive operations of one module, one level of its name after the other.
const leafOf = index => ({leaf: index, title: nodes[index].label, count: 1, bytes: nodes[index].bytes, boundary: nodes[index].boundary, phase: nodes[index].phase});
const groupOf = (title, path, phase, children) => {
  const made = {title, path, phase, children, open: false, count: 0, bytes: 0, boundary: ""};
  for (const child of children) {
    child.parent = made;
    made.count += child.count; made.bytes += child.bytes;
    made.boundary = made.boundary || child.boundary;
  }
  return made;
};
const build = (indices, depth, path, phase) => {
  const items = [];
  for (let i = 0; i < indices.length;) {
    const parts = nodes[indices[i]].parts;
    if (parts.length <= depth) { items.push(leafOf(indices[i])); i += 1; continue; }
    let j = i;
    while (j < indices.length && nodes[indices[j]].parts.length > depth && nodes[indices[j]].parts[depth] === parts[depth]) j += 1;
    const own = path ? path + "." + parts[depth] : parts[depth];
    const children = build(indices.slice(i, j), depth + 1, own, phase);
    const only = children.length === 1 ? children[0] : null;
    if (only && only.children && !(phase === "input" && depth === 0)) { only.title = parts[depth] + "." + only.title; items.push(only); }
    else items.push(groupOf(parts[depth], own, phase, children));
    i = j;
  }
  return items;
};
// Of what a state belongs to: that of "optimizer.layers.0.weight.step" is layers, 0, weight.
const ownersOf = node => node.scope === "inputs" ? [] : node.name.replace(/^optimizer\./, "").split(".").slice(0, -1);
const partsOf = node => node.phase === "input" ? [node.scope, ...ownersOf(node)] : node.phase === "output" ? [node.scope] : node.scope ? node.scope.split(".") : [];
nodes.forEach(node => { node.parts = partsOf(node); node.readers = []; });
nodes.forEach((node, index) => node.inputs.forEach(from => nodes[from].readers.push(index)));
const phases = new Map();
nodes.forEach((node, index) => { const phase = node.phase === "between" ? "update" : node.phase; phases.has(phase) ? phases.get(phase).push(index) : phases.set(phase, [index]); });
const columns = [[], [], [], []];
const kinds = [...new Set(nodes.filter(node => node.phase === "input").map(node => node.scope))].sort(); // parameters are among inputs
if (phases.has("input")) phases.get("input").sort((a, b) => kinds.indexOf(nodes[a].scope) - kinds.indexOf(nodes[b].scope) || a - b);
for (const [phase, indices] of phases) {
  const items = build(indices, 0, "", phase);
  columns[COLUMNS[phase] ?? 1].push(...(phase === "update" ? [groupOf("optimizer", "", phase, items)] : items));
}
columns[2].reverse();
const placed = new Map(); // of every leaf, its item
const eachLeaf = (item, act) => item.children ? item.children.forEach(child => eachLeaf(child, act)) : act(item);
columns.flat().forEach(item => eachLeaf(item, leaf => placed.set(leaf.leaf, leaf)));
const eachGroup = (items, act) => { for (const item of items) if (item.children) { act(item); eachGroup(item.children, act); } };

// The first look: open what still leaves a picture of some fifty boxes, the widest levels first; the optimizer stays one box.
const openFirst = most => {
  let level = columns.flat(), shown = level.length;
  while (level.length) {
    const next = [];
    for (const item of level) if (item.children && item.phase !== "update" && item.phase !== "input" && shown + item.children.length - 1 <= most) {
      item.open = true; shown += item.children.length - 1; next.push(...item.children);
    }
    level = next;
  }
};
openFirst(columns[1].length > 40 ? 0 : 56);

let visible = [], edges = [], extent = [0, 0, 1, 1];
const layout = () => {
  visible = [];
  const height = item => !item.children ? LEAF : !item.open ? FOLDED
    : HEAD + PAD + item.children.reduce((sum, child) => sum + height(child) + GAP, 0);
  const depth = item => item.children && item.open ? 1 + Math.max(0, ...item.children.map(depth)) : 0;
  const place = (item, x, y, w) => {
    Object.assign(item, {x, y, w, h: height(item)});
    visible.push(item);
    if (!item.children || !item.open) return;
    let next = y + HEAD;
    for (const child of item.phase === "backward" ? [...item.children].reverse() : item.children) { place(child, x + PAD, next, w - 2 * PAD); next += child.h + GAP; }
  };
  const tall = columns.map(column => column.reduce((sum, item) => sum + height(item) + GAP * 2, 0)), bottom = Math.max(tall[1], tall[2]);
  let x = 0;
  columns.forEach((column, number) => {
    if (!column.length) return;
    const wide = WIDTH + 2 * PAD * Math.max(...column.map(depth));
    let y = number === 2 ? bottom - tall[2] : 0;
    for (const item of column) { place(item, x, y, wide); y += item.h + GAP * 2; }
    x += wide + BETWEEN;
  });
  extent = [0, 0, x - BETWEEN, Math.max(...tall)];
  const shownAs = item => { let found = item; for (let up = item.parent; up; up = up.parent) if (!up.open) found = up; return found; };
  const as = nodes.map((_, index) => shownAs(placed.get(index))), found = new Map();
  visible.forEach((item, number) => { item.number = number; item.edges = []; });
  nodes.forEach((node, to) => node.inputs.forEach(from => {
    const [a, b] = [as[from], as[to]];
    if (a === b) return;
    const id = a.number * 1e6 + b.number, edge = found.get(id) || {a, b, bytes: 0, count: 0, sources: new Set()};
    if (!edge.sources.has(from)) { edge.sources.add(from); edge.bytes += nodes[from].bytes; }
    edge.count += 1;
    found.set(id, edge);
  }));
  edges = [...found.values()];
  for (const edge of edges) { edge.a.edges.push(edge); edge.b.edges.push(edge); }
  document.body.dataset.visible = visible.length;
};

let scale = 1, dx = 0, dy = 0, picked = null, hits = new Set();
const canvas = $("canvas");
const ends = ({a, b}) => {
  const down = a.x === b.x || Math.abs(a.x - b.x) < 60, ya = a.y + Math.min(a.h, FOLDED) / 2, yb = b.y + Math.min(b.h, FOLDED) / 2;
  if (down) { const reach = 14 + Math.min(60, Math.abs(yb - ya) / 8), left = Math.min(a.x, b.x); return [a.x, ya, left - reach, ya, left - reach, yb, b.x, yb]; }
  const right = b.x > a.x, xa = right ? a.x + a.w : a.x, xb = right ? b.x : b.x + b.w, reach = Math.max(40, Math.abs(xb - xa) * .45) * (right ? 1 : -1);
  return [xa, ya, xa + reach, ya, xb - reach, yb, xb, yb];
};
const countOf = item => `${item.count} ${item.phase === "input" || item.phase === "output" ? "tensor" : "op"}${item.count === 1 ? "" : "s"}`;
const formOf = item => item.children ? countOf(item) : nodes[item.leaf].boundary && nodes[item.leaf].phase !== "output" ? nodes[item.leaf].boundary : nodes[item.leaf].shape;
const redraw = canvasOf(canvas, (context, width, tall) => {
  const paint = {}, of = name => paint[name] = paint[name] || colour(name);
  context.fillStyle = of("ground"); context.fillRect(0, 0, width, tall);
  context.translate(dx, dy); context.scale(scale, scale);
  const [left, top, right, bottom] = [-dx / scale, -dy / scale, (width - dx) / scale, (tall - dy) / scale];
  const near = new Set(picked ? picked.edges.flatMap(edge => [edge.a, edge.b]) : []);
  if (picked) near.add(picked);
  const dim = picked && !(picked.children && picked.open) || hits.size, lit = item => !dim || near.has(item) || hits.has(item) || item.hit;
  const group = (item, test) => { for (let up = item.parent; up; up = up.parent) if (test(up)) return true; return false; };
  const labels = []; // where there are some already
  const isFree = box => !labels.some(one => box[0] < one[2] && box[2] > one[0] && box[1] < one[3] && box[3] > one[1]) && labels.push(box);
  const mine = new Set(picked ? picked.edges : []);
  const quiet = edge => !mine.has(edge) && (edge.a.phase === "input" || edge.b.phase === "output"); // below the boxes
  const drawEdges = wanted => edges.filter(wanted).forEach(edge => {
    const line = ends(edge);
    if (Math.max(line[0], line[6]) < left || Math.min(line[2], line[4], line[0], line[6]) > right || Math.max(line[1], line[7]) < top || Math.min(line[1], line[7]) > bottom) return;
    const own = mine.has(edge), state = quiet(edge);
    if (!own && edges.length > 4000 && scale < .5) return;
    context.globalAlpha = own ? 1 : dim ? .08 : state ? .18 : .5;
    context.strokeStyle = of(own ? "mark" : state ? "input" : "soft"); context.lineWidth = own ? 2 / Math.min(1, scale) : Math.min(4, .8 + Math.log10(1 + edge.bytes / 4096));
    context.beginPath(); context.moveTo(line[0], line[1]); context.bezierCurveTo(...line.slice(2)); context.stroke();
    const tip = Math.sign(line[6] - line[4]) || 1; // an arrow's head where it ends
    context.beginPath(); context.moveTo(line[6], line[7]); context.lineTo(line[6] - 6 * tip, line[7] - 3.5); context.lineTo(line[6] - 6 * tip, line[7] + 3.5); context.fillStyle = context.strokeStyle; context.fill();
    if ((own || !state && edges.length < 160) && edge.bytes && scale > .55 && labels.length < 80) {
      const beside = line[2] < Math.min(line[0], line[6]); // of boxes above each other: left of the bend, off the boxes
      const x = (line[0] + 3 * line[2] + 3 * line[4] + line[6]) / 8 - (beside ? 3 : 0), y = (line[1] + line[7]) / 2, text = bytes(edge.bytes);
      const wide = 6 * text.length, start = x - (beside ? wide : wide / 2);
      if (!isFree([start, y - 6, start + wide, y + 6]) && !own) return;
      context.font = "10px system-ui, sans-serif"; context.textAlign = beside ? "right" : "center"; context.globalAlpha = own ? 1 : dim ? .1 : .9;
      context.lineWidth = 3; context.strokeStyle = of("ground"); context.strokeText(text, x, y); context.fillStyle = of("soft"); context.fillText(text, x, y);
      context.textAlign = "left";
    }
  });
  drawEdges(quiet);
  for (const item of visible) {
    if (item.x > right || item.x + item.w < left || item.y > bottom || item.y + item.h < top) continue;
    const open = item.children && item.open, fill = item.boundary && !open ? "boundary" : item.phase === "output" ? "input" : item.phase === "between" ? "update" : item.phase;
    const dimmed = !open && !lit(item) && !group(item, up => up === picked);
    context.globalAlpha = dimmed ? .25 : 1;
    context.beginPath(); context.roundRect(item.x, item.y, item.w, item.h, open ? 8 : 4);
    context.fillStyle = of(open ? "paper" : fill); context.fill();
    context.lineWidth = item === picked ? 3 / Math.min(1, scale) : open ? 1 : .5; context.strokeStyle = of(item === picked ? "mark" : open ? fill in KEYS ? fill : "line" : "line"); context.stroke();
    if (scale * LEAF < 7) continue;
    context.globalAlpha = 1;
    const line = item.y + (open ? HEAD / 2 + 1 : item.h / 2), side = open ? `${countOf(item)}, click to fold` : (item.children ? "▸ " : "") + formOf(item);
    context.textBaseline = "middle"; context.font = `${item.children ? "600 " : ""}12px system-ui, sans-serif`;
    context.fillStyle = open ? of("ink") : dimmed ? of("soft") : "#fff";
    const room = item.w - 20 - 6.3 * side.length;
    context.fillText(shortened(item.title, Math.max(4, Math.floor(room / 6.6))), item.x + 8, line);
    context.font = "11px system-ui, sans-serif"; context.textAlign = "right"; context.globalAlpha = .85;
    context.fillStyle = open || dimmed ? of("soft") : "#fff"; context.fillText(side, item.x + item.w - 8, line);
    context.textAlign = "left";
  }
  drawEdges(edge => !quiet(edge));
});
const zoom = (factor, x = canvas.clientWidth / 2, y = canvas.clientHeight / 2) => {
  const next = Math.min(3, Math.max(.01, scale * factor));
  dx = x - (x - dx) * next / scale; dy = y - (y - dy) * next / scale; scale = next; redraw();
};
const move = (x, y) => { dx += x; dy += y; redraw(); };
const fit = () => {
  const [x, y, right, bottom] = extent, width = canvas.clientWidth, tall = canvas.clientHeight;
  scale = Math.max(.01, Math.min((width - 32) / (right - x), (tall - 32) / (bottom - y), 1.4));
  dx = (width - scale * (right + x)) / 2; dy = (tall - scale * (bottom + y)) / 2;
  redraw();
};
// Where the whole would be too small to read, its upper part, from the forward on.
const READABLE = innerWidth < 600 ? 1 : .75;
const fitReadable = () => {
  fit();
  const wide = (canvas.clientWidth - 32) / (extent[2] - extent[0]), first = (columns[1][0] || columns.flat()[0] || {x: 0}).x;
  if (scale >= READABLE) return;
  scale = Math.max(READABLE, Math.min(wide, 1)); dy = 16;
  dx = wide >= scale ? (canvas.clientWidth - scale * (extent[2] + extent[0])) / 2 : 24 - scale * first;
  redraw();
};
const centre = item => { scale = Math.max(scale, READABLE); dx = canvas.clientWidth / 2 - (item.x + item.w / 2) * scale; dy = canvas.clientHeight / 2 - (item.y + Math.min(item.h, 60) / 2) * scale; redraw(); };
const at = (x, y) => {
  const [px, py] = [(x - dx) / scale, (y - dy) / scale];
  return visible.findLast(item => px >= item.x && px <= item.x + item.w && py >= item.y && py <= item.y + item.h);
};
const edgeAt = (x, y) => {
  const [px, py] = [(x - dx) / scale, (y - dy) / scale], reach = 6 / scale;
  let best = null, least = reach;
  for (const edge of edges) {
    if (edge.a.phase === "input" && !(picked && picked.edges.includes(edge))) continue;
    const [a, b, c, d, e, f, g, h] = ends(edge);
    if (px < Math.min(a, c, e, g) - reach || px > Math.max(a, c, e, g) + reach || py < Math.min(b, h) - reach || py > Math.max(b, h) + reach) continue;
    for (let t = 0; t <= 1; t += .02) {
      const s = 1 - t, far = Math.hypot(s * s * s * a + 3 * s * s * t * c + 3 * s * t * t * e + t * t * t * g - px, s * s * s * b + 3 * s * s * t * d + 3 * s * t * t * f + t * t * t * h - py);
      if (far < least) { least = far; best = edge; }
    }
  }
  return best;
};
const pathOf = item => { const parts = []; for (let up = item; up; up = up.parent) parts.unshift(up.title); return parts.join(" › "); };
const openTo = item => { let changed = false; for (let up = item.parent; up; up = up.parent) if (!up.open) { up.open = true; changed = true; } if (changed) layout(); };
const go = item => { openTo(item); select(item); centre(item); };

const detail = $("detail");
const linksTo = (items, most = 12) => {
  const made = element("span");
  items.slice(0, most).forEach((item, i) => {
    const link = element("a", {tabindex: 0, role: "button"}, item.children ? pathOf(item) : nodes[item.leaf].name);
    link.addEventListener("click", () => go(item)); link.addEventListener("keydown", event => { if (event.key === "Enter") go(item); });
    made.append(i ? ", " : "", link);
  });
  if (items.length > most) made.append(` and ${items.length - most} more`);
  return made;
};
const select = item => {
  picked = item;
  detail.style.display = item ? "block" : "none";
  detail.replaceChildren();
  if (item) {
    const close = element("button", {"aria-label": "close"}, "×"), table = element("table"), node = item.children ? null : nodes[item.leaf];
    close.addEventListener("click", () => select(null));
    const from = [...new Set(item.edges.filter(edge => edge.b === item).map(edge => edge.a))], to = [...new Set(item.edges.filter(edge => edge.a === item).map(edge => edge.b))];
    const rows = node
      ? {name: node.name, module: node.scope, phase: node.phase, shape: node.shape, dtype: node.dtype, bytes: node.bytes ? bytes(node.bytes) : "", boundary: node.boundary}
      : {module: item.path, phase: item.phase, operations: item.count, results: bytes(item.bytes), boundary: item.boundary};
    if (from.length) rows["reads from"] = linksTo(from);
    if (to.length) rows["read by"] = linksTo(to);
    for (const name in rows) if (rows[name]) table.append(element("tr", {}, element("td", {}, name), element("td", {}, rows[name])));
    detail.append(close, element("h2", {}, item.title), table);
  }
  redraw();
};
const toggle = item => {
  const [x, y] = [item.x * scale + dx, item.y * scale + dy];
  item.open = !item.open; layout(); dx = x - item.x * scale; dy = y - item.y * scale; select(item);
};
gestures(canvas, {
  move, zoom,
  click: (x, y) => {
    const item = at(x, y);
    canvas.focus({preventScroll: true});
    if (item && item.children && (!item.open || (y - dy) / scale < item.y + HEAD)) toggle(item);
    else if (item && !item.children) select(item === picked ? null : item);
    else { const edge = edgeAt(x, y); if (edge) go(picked === edge.b ? edge.a : edge.b); else select(null); }
  },
  hover: (x, y, event) => {
    const item = at(x, y), edge = item && !(item.children && item.open) ? null : edgeAt(x, y);
    if (edge) showTip(event, `${edge.a.title} → ${edge.b.title}`, [`${bytes(edge.bytes)} in ${edge.sources.size} tensor${edge.sources.size === 1 ? "" : "s"}`]);
    else if (item) showTip(event, pathOf(item), item.children ? [`${item.count} operations, results of ${bytes(item.bytes)}`, item.boundary] : [nodes[item.leaf].name, [nodes[item.leaf].dtype, nodes[item.leaf].shape, nodes[item.leaf].boundary].filter(Boolean).join(" · ")]);
    else hideTip();
  },
});
const search = $("search");
let found = [], turn = 0, sought = "";
const openAll = open => { eachGroup(columns.flat(), item => { item.open = open; }); if (!open) openFirst(56); select(null); layout(); fitReadable(); };
const markHits = () => {
  eachGroup(columns.flat(), item => { item.hit = false; });
  for (const item of hits) for (let up = item.parent; up; up = up.parent) up.hit = true;
};
const goHit = () => { if (found.length) { const item = placed.get(found[turn % found.length]); openTo(item); centre(item); } };
const seek = () => {
  const text = search.value.trim().toLowerCase();
  turn = 0; sought = search.value; select(null);
  found = text ? nodes.map((_, i) => i).filter(i => (nodes[i].label + " " + nodes[i].scope + " " + nodes[i].name).toLowerCase().includes(text)) : [];
  hits = new Set(found.map(index => placed.get(index)));
  markHits();
  $("found").textContent = text ? `${found.length} found` : "";
  goHit(); redraw();
};
let typing = 0;
search.addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(seek, 250); }); // not what half a word finds
search.addEventListener("keydown", event => { if (event.key === "Enter") { clearTimeout(typing); if (sought !== search.value) seek(); else { turn += 1; goHit(); } } if (event.key === "Escape") { search.value = ""; seek(); canvas.focus(); } });
const step = by => { const boxes = visible.filter(item => !item.open || !item.children), i = boxes.indexOf(picked), item = boxes[(i + by + boxes.length) % boxes.length]; select(item); centre(item); };
const keys = {ArrowLeft: () => move(60, 0), ArrowRight: () => move(-60, 0), ArrowUp: () => move(0, 60), ArrowDown: () => move(0, -60), "+": () => zoom(1.3), "=": () => zoom(1.3), "-": () => zoom(1 / 1.3), "0": fit,
  j: () => step(1), k: () => step(-1), Enter: () => { if (picked && picked.children) toggle(picked); }, Escape: () => select(null)};
canvas.addEventListener("keydown", event => { if (keys[event.key] && !event.ctrlKey && !event.metaKey) { event.preventDefault(); keys[event.key](); } });
addEventListener("keydown", event => { if (event.key === "/" && document.activeElement !== search) { event.preventDefault(); search.focus(); } });
$("in").onclick = () => zoom(1.4); $("out").onclick = () => zoom(1 / 1.4); $("fit").onclick = fit;
$("open").onclick = () => openAll(true); $("fold").onclick = () => openAll(false);

// Memory over the run.
const {alive, makers} = data, peak = Math.max(...alive, 1);
const atPeak = nodes.findIndex(node => node.name === data.peak), highest = element("a", atPeak < 0 ? {} : {tabindex: 0, role: "button"}, data.peak);
if (atPeak >= 0) { highest.addEventListener("click", () => go(placed.get(atPeak))); highest.addEventListener("keydown", event => { if (event.key === "Enter") go(placed.get(atPeak)); }); }
$("memory-peak").append(`bytes allocated over the run, at most ${bytes(peak)} at `, highest);
const memory = $("memory");
canvasOf(memory, (context, width, tall) => {
  context.clearRect(0, 0, width, tall);
  context.beginPath(); context.moveTo(0, tall);
  alive.forEach((value, i) => { const y = tall - (tall - 4) * value / peak; context.lineTo(width * i / alive.length, y); context.lineTo(width * (i + 1) / alive.length, y); });
  context.lineTo(width, tall); context.fillStyle = colour("forward"); context.globalAlpha = .55; context.fill();
  context.globalAlpha = 1; context.fillStyle = colour("mark"); context.fillRect(width * alive.indexOf(peak) / alive.length, 0, 2, tall);
});
const positionAt = event => Math.max(0, Math.min(alive.length - 1, Math.floor(event.offsetX / memory.clientWidth * alive.length)));
memory.addEventListener("pointermove", event => { const i = positionAt(event); showTip(event, bytes(alive[i]), [makers[i] || ""]); });
memory.addEventListener("pointerleave", hideTip);
memory.addEventListener("click", event => {
  for (let i = positionAt(event); i >= 0; i--) {
    const index = makers[i] ? nodes.findIndex(node => node.name === makers[i]) : -1;
    if (index >= 0) { go(placed.get(index)); return; }
  }
});
layout(); fitReadable();
if (location.hash.length > 1) {
  const asked = decodeURIComponent(location.hash.slice(1));
  if (asked === "*") openAll(true); else { search.value = asked; seek(); }
}
redraw.now();
document.body.dataset.nodes = nodes.length;
document.body.dataset.edges = edges.length;
