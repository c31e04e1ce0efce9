const {job, trace} = data;
const KINDS = {step: "step", compute: "forward", crossing: "crossing", serve: "serve", wait: "wait", load: "load", operator: "operator"};
const kindOf = (category, name) => category === "compute"
  ? name.startsWith("backward") ? "backward" : /optimizer|push|weight/.test(name) ? "update" : "forward"
  : KINDS[category] || "operator";
const key = (name, text) => element("span", {class: "key"}, element("i", {style: `background:var(--${name})`}), text);
const section = (title, ...parts) => {
  const made = element("section", {}, element("div", {class: "title"}, element("h2", {}, title)), ...parts);
  $("sections").append(made);
  return made;
};
const SMALL = innerWidth < 600;

// The map: processes in rows by role, a curve for each pair that exchanged bytes.
const drawMap = () => {
  const crossings = [...(trace ? trace.crossings : job ? job.crossings : [])];
  const names = new Set(job ? job.roles.map(role => role.name) : []);
  for (const lane of trace ? trace.lanes : []) names.add(lane.process);
  const total = new Map();
  for (const one of crossings) {
    names.add(one.from); names.add(one.to);
    const pair = [one.from, one.to].sort(), id = pair.join("\n");
    const found = total.get(id) || {pair, bytes: 0, parts: new Map()};
    found.bytes += one.bytes;
    found.parts.set(one.name, (found.parts.get(one.name) || 0) + one.bytes);
    total.set(id, found);
  }
  for (const name of [...names]) if (![...total.values()].some(one => one.pair.includes(name)) && !(job && job.roles.some(role => role.name === name))) names.delete(name);
  if (names.size < 2) return;
  const rows = new Map();
  for (const name of names) {
    const role = name.replace(/ \d+$/, "");
    rows.set(role, [...(rows.get(role) || []), name]);
  }
  const workers = rows.get("worker") || [], others = [...rows.keys()].sort().filter(role => role !== "worker").flatMap(role => rows.get(role).sort((a, b) => a.localeCompare(b, "en", {numeric: true})));
  const most = SMALL ? 3 : 7, half = SMALL ? 48 : 62, lines = [];
  for (const line of [workers, others]) for (let i = 0; i < line.length; i += most) lines.push(line.slice(i, i + most));
  const wide = Math.max(...lines.map(line => line.length), 2), width = SMALL ? Math.max(innerWidth - 40, wide * 104) : wide * Math.max(170, Math.min(260, 1100 / wide));
  const curved = lines.length - 1, height = 44 + 130 * (lines.length - 1) + ([...total.values()].some(one => lines[curved].includes(one.pair[0]) && lines[curved].includes(one.pair[1])) ? 64 : 22), at = new Map();
  lines.forEach((line, y) => line.forEach((name, x) => at.set(name, [width * (x + .5) / line.length, 30 + 130 * y])));
  const svg = drawn(element("div"), "svg", {viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": "who exchanged bytes with whom"});
  const heaviest = Math.max(...[...total.values()].map(one => one.bytes), 1);
  const labels = [], step = width / wide;
  const curve = (p0, p1, p2, p3) => t => (1 - t) ** 3 * p0 + 3 * (1 - t) ** 2 * t * p1 + 3 * (1 - t) * t * t * p2 + t ** 3 * p3;
  for (const {pair: [a, b], bytes: size, parts} of total.values()) {
    const [x1, y1] = at.get(a), [x2, y2] = at.get(b);
    // Neighbours in a row are joined below it; a line that skips a row goes around the box in between.
    const down = y1 === y2 ? 46 : 0, aside = Math.abs(y1 - y2) > 140 && Math.abs(x1 - x2) < step ? (x1 + x2 < width ? 1 : -1) * step * .66 : 0;
    const points = a === b ? [x1 - 20, y1 - 16, x1 - 30, y1 - 50, x1 + 30, y1 - 50, x1 + 20, y1 - 16]
      : [x1, y1, x1 + aside, y1 + down + (y2 - y1) * (aside ? .3 : 0), x2 + aside, y2 + down - (y2 - y1) * (aside ? .3 : 0), x2, y2];
    const path = `M${points.slice(0, 2)} C${points.slice(2)}`;
    const line = drawn(svg, "path", {d: path, fill: "none", stroke: "var(--crossing)", "stroke-opacity": .55,
      "stroke-width": 1 + 6 * Math.sqrt(size / heaviest)});
    drawn(line, "title", {}, `${a} and ${b}: ${bytes(size)}\n` + [...parts].map(([name, n]) => `${name}: ${bytes(n)}`).join("\n"));
    labels.push([curve(...[0, 2, 4, 6].map(i => points[i])), curve(...[1, 3, 5, 7].map(i => points[i])), bytes(size), size]);
  }
  // The heaviest first, each where its line has room for it; what has none is told on hover.
  const taken = [...at.values()].map(([x, y]) => [x - half, y - 17, x + half, y + 17]);
  for (const [alongX, alongY, text] of labels.sort((one, other) => other[3] - one[3])) {
    const wide = 4 + 6.6 * text.length;
    for (const share of [.5, .4, .6, .32, .68, .26, .74, .2, .8]) {
      const x = alongX(share), y = alongY(share), box = [x - wide / 2, y - 8, x + wide / 2, y + 8];
      if (box[0] < 0 || box[2] > width || taken.some(one => box[0] < one[2] && box[2] > one[0] && box[1] < one[3] && box[3] > one[1])) continue;
      taken.push(box);
      drawn(svg, "text", {x, y: y + 4, "text-anchor": "middle", stroke: "var(--paper)", "stroke-width": 4, "paint-order": "stroke"}, text);
      break;
    }
  }
  for (const [name, [x, y]] of at) {
    const box = drawn(svg, "g", {});
    drawn(box, "rect", {x: x - half, y: y - 17, width: 2 * half, height: 34, rx: 7, fill: "var(--paper)", stroke: name.startsWith("worker") ? "var(--forward)" : "var(--serve)", "stroke-width": 1.5});
    drawn(box, "text", {x, y: y + 4, "text-anchor": "middle"}, shortened(name, SMALL ? 14 : 18));
    drawn(box, "title", {}, name);
  }
  section("Who exchanged what with whom", element("div", {class: "scroll"}, svg.parentNode));
};

// Values that are not finite are null, and gaps in the line.
const chart = (title, values, unit, from, to) => {
  const width = SMALL ? innerWidth - 40 : Math.min(600, (Math.min(innerWidth, 1280) - 80) / 2), height = 150, left = 62, bottom = 22, known = values.filter(v => v !== null);
  const low = Math.min(...known), high = Math.max(...known), range = high - low || Math.abs(high) || 1;
  const x = i => left + (width - left - 8) * (values.length > 1 ? i / (values.length - 1) : .5);
  const y = v => 8 + (height - bottom - 16) * (1 - (v - low) / range);
  const svg = drawn(element("div"), "svg", {viewBox: `0 0 ${width} ${height}`, width: "100%", role: "img",
    "aria-label": `${title}, from ${number(known[0])} to ${number(known[known.length - 1])}`});
  for (const value of [low, low + range / 2, low + range]) {
    drawn(svg, "path", {class: "axis", d: `M${left} ${y(value)}H${width - 8}`});
    drawn(svg, "text", {class: "soft", x: left - 6, y: y(value) + 4, "text-anchor": "end"}, number(value));
  }
  const points = values.map((v, i) => v === null ? "" : `${i && values[i - 1] !== null ? "L" : "M"}${x(i).toFixed(1)} ${y(v).toFixed(1)}`);
  drawn(svg, "path", {d: points.join(""), fill: "none", stroke: "var(--forward)", "stroke-width": 2, "stroke-linejoin": "round"});
  const spot = drawn(svg, "circle", {r: 4, fill: "var(--mark)", visibility: "hidden"});
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), share = ((event.clientX - box.left) * width / box.width - left) / (width - left - 8);
    const i = Math.max(0, Math.min(values.length - 1, Math.round(share * (values.length - 1)))), value = values[i];
    showTip(event, value === null ? "not finite" : number(value) + unit, [`${Math.round(100 * i / Math.max(1, values.length - 1))} % of the run`]);
    for (const [name, to] of Object.entries(value === null ? {visibility: "hidden"} : {cx: x(i), cy: y(value), visibility: "visible"})) spot.setAttribute(name, to);
  });
  svg.addEventListener("pointerleave", () => { hideTip(); spot.setAttribute("visibility", "hidden"); });
  drawn(svg, "text", {class: "soft", x: left, y: height - 5}, from);
  drawn(svg, "text", {class: "soft", x: width - 8, y: height - 5, "text-anchor": "end"}, to);
  return element("div", {}, element("div", {class: "soft"}, `${title} ${values[values.length - 1] === null ? "not finite" : number(values[values.length - 1]) + unit}`), svg.parentNode);
};

const drawJob = () => {
  if (!job) return;
  const charts = element("div", {class: "pair"});
  const steps = job.roles.map(role => role.facts.steps).find(count => count !== undefined);
  if (job.loss.filter(v => v !== null).length > 1) charts.append(chart("loss", job.loss, "", "first step", steps ? `step ${steps}` : "now"));
  if (job.pace.length > 1) charts.append(chart("pace", job.pace, " steps/s", "start", duration(job.seconds * 1e6)));
  if (charts.children.length) section("Loss and pace", charts);
  const some = job.roles.some(role => role.waiting_for), titles = ["process", "state", ...(some ? ["waits for"] : []), "facts"];
  const table = element("table", {}, element("tr", {}, ...titles.map(text => element("th", {}, text))));
  for (const role of job.roles) {
    const waits = role.waiting_for ? `${role.waiting_for} in ${role.operation}, ${duration(role.waiting_seconds * 1e6)}` : "";
    const said = (name, value) => typeof value !== "number" ? value : name.includes("bytes") ? bytes(value) : name === "uptime" ? duration(value * 1e6) : Number.isInteger(value) ? value.toLocaleString("en") : number(value);
    const facts = Object.entries(role.facts).filter(([name]) => !["pid", "endpoint"].includes(name)).map(([name, value]) => `${name.replaceAll("_", " ")} ${said(name, value)}`).join(", ");
    const state = element("span", {class: "state " + role.state}, job.ended ? "ended" : role.state);
    table.append(element("tr", {}, ...[role.name, state, ...(some ? [waits] : []), element("span", {class: "soft"}, facts)].map((cell, i) => element("td", i < 2 ? {class: "whole"} : {}, cell))));
  }
  section("Processes", element("div", {class: "scroll"}, table));
};

// The pipeline: pictures of pipeline/drawing.py, as planned above and as it ran below.
const drawSchedules = () => {
  if (!trace || !trace.schedules.length) return;
  const choice = element("select", {"aria-label": "step"}, ...trace.schedules.map((one, i) => element("option", {value: i}, "step " + one.step)));
  choice.value = Math.floor(trace.schedules.length / 2);
  const space = element("div");
  const made = section("The pipeline", space, element("div", {class: "soft"}, "Planned: a forward takes 1, a backward 2 (or 1 and its weights 1), a message nothing."));
  made.firstChild.append(choice);
  const picture = text => document.importNode(new DOMParser().parseFromString(text, "image/svg+xml").documentElement, true);
  const draw = () => { const {planned, ran} = trace.schedules[choice.value]; space.replaceChildren(picture(planned), picture(ran)); };
  choice.addEventListener("change", draw);
  draw();
};

// A time of the axis, with as many digits as tell it from the next tick.
const tickText = (time, tick) => {
  const [unit, name] = Math.max(Math.abs(time), tick) >= 1e6 ? [1e6, " s"] : tick >= 1e3 ? [1e3, " ms"] : [1, " µs"];
  return (time / unit).toFixed(Math.max(0, Math.ceil(Math.log10(unit / tick) - 1e-9))) + name;
};

// The timeline: one canvas; the view is [from, to] in microseconds.
let reveal = () => {};
const drawTimeline = () => {
  if (!trace || !trace.lanes.length) return;
  const ROW = 15, NAME = SMALL ? 84 : 170, HEAD = 20;
  // What overlaps has lanes of its own in the file ("workers", "workers 2", ...); here they are one row of some lines.
  const rows = [], LINES = 4, laneRows = new Map(), bases = new Map();
  let process = null, first = Infinity, last = -Infinity, top = HEAD;
  trace.lanes.forEach((lane, index) => {
    const spans = [], open = [], base = bases.get(lane.process + "\n" + lane.name.replace(/ \d+$/, "")), line = base ? Math.min(base.lanes, LINES - 1) : 0;
    let depth = 0;
    for (let i = 0; i < lane.spans.length; i += 5) {
      const [name, category, start, length, facts] = lane.spans.slice(i, i + 5);
      while (open.length && open[open.length - 1] <= start + 1e-9) open.pop();
      spans.push({name: trace.texts[name], kind: kindOf(trace.texts[category], trace.texts[name]), category: trace.texts[category], start, end: start + length, facts: trace.facts[facts], depth: line + open.length, longest: 0});
      open.push(start + length);
      depth = Math.max(depth, open.length);
      first = Math.min(first, start); last = Math.max(last, start + length);
    }
    if (base) { base.spans.push(...spans); base.lanes += 1; base.depth = Math.max(base.depth, line + depth); laneRows.set(index, [base, line]); return; }
    const row = {lane, spans, depth, lanes: 1};
    if (lane.process !== process) { rows.push({title: lane.process, h: 18}); process = lane.process; }
    bases.set(lane.process + "\n" + lane.name, row);
    laneRows.set(index, [row, 0]);
    rows.push(row);
  });
  for (const row of rows) {
    if (row.title !== undefined) { row.y = top + 4; top += 22; continue; }
    row.y = top; row.h = row.depth * ROW + 2; top += row.h + 1;
    if (row.lanes > 1) row.spans.sort((one, other) => one.start - other.start);
    // The latest end so far, by which a search from the left knows where to begin.
    let longest = -Infinity;
    for (const span of row.spans) { longest = Math.max(longest, span.end); span.longest = longest; }
  }
  // On a phone all rows are there, and a finger that moves up or down scrolls the page.
  const height = Math.min(top + 6, SMALL ? 3000 : Math.round(innerHeight * .75));
  const canvas = element("canvas", {class: "drawing", tabindex: 0, role: "img", style: `height:${height}px${SMALL ? ";touch-action:pan-y" : ""}`,
    "aria-label": "timeline of all processes; arrow keys move, plus and minus zoom, 0 shows all"});
  const view = {from: first, to: last, y: 0}, all = {from: first, to: last};
  const taken = new Map(); // by the name of a step: those that were taken; of one that trains they are the most
  for (const span of rows.flatMap(row => row.spans || [])) if (span.category === "step") {
    const found = taken.get(span.name) || taken.set(span.name, {numbers: new Set(), spans: []}).get(span.name);
    found.numbers.add((span.facts || {}).step); found.spans.push(span);
  }
  const steps = [...taken.values()].sort((a, b) => b.numbers.size - a.numbers.size).map(found => found.spans)[0] || [];
  steps.sort((a, b) => a.start - b.start);
  if (steps.length > 12) { // the whole of a long run is a grey bar
    const middle = steps[Math.floor(steps.length / 2)], some = (middle.end - middle.start) * 4;
    view.from = middle.start - some / 2; view.to = middle.end + some / 2;
  }
  let picked = null, boxes = [];
  const redraw = canvasOf(canvas, (context, width, tall) => {
    const ink = colour("ink"), soft = colour("soft"), line = colour("line"), paper = colour("paper"), ground = colour("ground");
    const scale = (width - NAME) / (view.to - view.from), x = time => NAME + (time - view.from) * scale;
    context.fillStyle = ground; context.fillRect(0, 0, width, tall);
    context.font = "11px system-ui, sans-serif"; context.textBaseline = "middle";
    boxes = [];
    const filled = new Map();
    for (const row of rows) {
      const y = row.y - view.y;
      if (y + row.h < HEAD || y > tall) continue;
      if (row.title !== undefined) { context.fillStyle = ink; context.font = "bold 12px system-ui, sans-serif"; context.fillText(shortened(row.title, 40), 6, y + 9); context.font = "11px system-ui, sans-serif"; continue; }
      context.fillStyle = soft; context.fillText(shortened(row.lane.name, SMALL ? 12 : 26), 10, y + ROW / 2 + 1);
      let low = 0, high = row.spans.length;
      while (low < high) { const middle = (low + high) >> 1; if (row.spans[middle].longest < view.from) low = middle + 1; else high = middle; }
      let edge = [];
      for (let i = low; i < row.spans.length; i++) {
        const span = row.spans[i];
        if (span.start > view.to) break;
        if (span.end < view.from) continue;
        const left = Math.max(NAME, x(span.start)), right = Math.min(width, x(span.end)), w = Math.max(right - left, .8);
        if (w < 1 && left < (edge[span.depth] || 0)) continue; // several of them in one pixel
        edge[span.depth] = left + 1;
        const fill = filled.get(span.kind) || filled.set(span.kind, colour(span.kind)).get(span.kind);
        context.fillStyle = fill; context.fillRect(left, y + span.depth * ROW, w > 3 ? w - .6 : w, ROW - 1.5);
        if (span === picked) { context.strokeStyle = colour("mark"); context.lineWidth = 2; context.strokeRect(left, y + span.depth * ROW, w, ROW - 1.5); }
        if (w > 30) {
          context.fillStyle = span.kind === "step" || span.kind === "operator" ? ink : "#fff";
          context.save(); context.beginPath(); context.rect(left, y + span.depth * ROW, w - 2, ROW); context.clip();
          context.fillText(span.name, left + 4, y + span.depth * ROW + ROW / 2); context.restore();
        }
        boxes.push([left, y + span.depth * ROW, w, span, row]);
      }
    }
    context.lineWidth = 1; context.strokeStyle = colour("mark");
    let count = 0;
    const visible = trace.arrows.filter(([, a, , b]) => Math.max(a, b) >= view.from && Math.min(a, b) <= view.to);
    context.globalAlpha = Math.max(.15, Math.min(.5, 30 / visible.length)); // many are a pattern, not a wall
    if (visible.length <= 400) for (const [la, a, lb, b] of visible) {
      const [[from, above], [to, below]] = [laneRows.get(la), laneRows.get(lb)];
      const ya = from.y + above * ROW - view.y + ROW / 2, yb = to.y + below * ROW - view.y + ROW / 2, xa = x(a), xb = x(b);
      if (Math.max(xa, xb) < NAME || Math.min(ya, yb) > tall) continue;
      context.beginPath(); context.moveTo(xa, ya); context.bezierCurveTo(xa + 24, ya, xb - 24, yb, xb, yb); context.stroke();
      context.beginPath(); context.arc(xb, yb, 2, 0, 7); context.fillStyle = colour("mark"); context.fill();
      count += 1;
    }
    context.globalAlpha = 1;
    context.fillStyle = paper; context.fillRect(0, 0, width, HEAD - 1); context.fillStyle = line; context.fillRect(0, HEAD - 1, width, 1);
    const room = (view.to - view.from) / Math.max(2, (width - NAME) / 110), power = 10 ** Math.floor(Math.log10(room));
    const tick = [1, 2, 5, 10].map(m => m * power).find(step => step >= room);
    context.fillStyle = soft;
    for (let time = Math.ceil((view.from - all.from) / tick) * tick; time + all.from <= view.to; time += tick) {
      context.fillText(tickText(time, tick), x(time + all.from) + 3, HEAD / 2); context.fillRect(x(time + all.from), 4, 1, HEAD - 8);
    }
    canvas.dataset.drawn = boxes.length; canvas.dataset.arrows = count; canvas.dataset.rows = rows.filter(row => row.spans).length;
  });
  const clamp = () => {
    const least = Math.min(1, (all.to - all.from) / 2), most = (all.to - all.from) * 1.1;
    const size = Math.min(Math.max(view.to - view.from, least), most), middle = (view.from + view.to) / 2;
    view.from = middle - size / 2; view.to = middle + size / 2;
    const edge = size * .9;
    if (view.to < all.from + size - edge) { view.to = all.from + size - edge; view.from = view.to - size; }
    if (view.from > all.to - size + edge) { view.from = all.to - size + edge; view.to = view.from + size; }
    view.y = Math.max(0, Math.min(view.y, top + 6 - canvas.clientHeight));
    redraw();
  };
  const zoom = (factor, at = NAME + (canvas.clientWidth - NAME) / 2) => {
    const share = Math.max(0, at - NAME) / (canvas.clientWidth - NAME), time = view.from + share * (view.to - view.from), size = (view.to - view.from) / factor;
    view.from = time - share * size; view.to = view.from + size; clamp();
  };
  const move = (dx, dy) => {
    const time = dx / (canvas.clientWidth - NAME) * (view.to - view.from);
    view.from -= time; view.to -= time; view.y -= dy; clamp();
  };
  const at = (x, y) => boxes.findLast(([left, upper, w, span]) => x >= left - 1 && x <= left + Math.max(w, 2) && y >= upper && y < upper + ROW);
  const facts = span => Object.entries(span.facts || {}).map(([name, value]) => name.includes("bytes") ? `${name.replace("_", " ")}: ${bytes(value)}` : `${name}: ${value}`);
  gestures(canvas, {
    move, zoom,
    wheel: event => {
      if (event.ctrlKey || event.metaKey || !event.shiftKey && document.activeElement === canvas) return true;
      return false; // the page scrolls until the timeline is clicked
    },
    click: (x, y, event) => { canvas.focus({preventScroll: true}); const box = at(x, y); picked = box ? box[3] : null; if (box) showTip(event, box[3].name, [duration(box[3].end - box[3].start), ...facts(box[3])]); redraw(); },
    hover: (x, y, event) => { const box = at(x, y); if (box) showTip(event, box[3].name, [`${duration(box[3].end - box[3].start)} from ${duration(box[3].start - all.from)}, ${box[4].lane.process}`, ...facts(box[3])]); else hideTip(); },
  });
  const whole = () => { Object.assign(view, all); clamp(); };
  const keys = {ArrowLeft: () => move(60, 0), ArrowRight: () => move(-60, 0), ArrowUp: () => move(0, 40), ArrowDown: () => move(0, -40),
    "+": () => zoom(1.5), "=": () => zoom(1.5), "-": () => zoom(1 / 1.5), "0": whole};
  canvas.addEventListener("keydown", event => { if (keys[event.key]) { event.preventDefault(); keys[event.key](); } });
  const button = (text, label, act) => { const made = element("button", {"aria-label": label, title: label}, text); made.addEventListener("click", act); return made; };
  const made = section("Timeline", canvas);
  redraw.now();
  made.firstChild.append(button("+", "zoom in", () => zoom(1.6)), button("−", "zoom out", () => zoom(1 / 1.6)), button("all", "show all", whole),
    ...[["step", "step"], ["forward", "forward"], ["backward", "backward"], ["update", "update"], ["crossing", "crossing"], ["serve", "serve"], ["wait", "wait"]].map(([name, text]) => key(name, text)));
  made.append(element("div", {class: "soft", style: "margin-top:6px"}, "Drag to move, click and use the wheel to zoom, pinch on a touch screen; arrow keys, + and − by keyboard. Lines lead from a sender to its receiver."));
  reveal = (name, start, length) => {
    const row = rows.find(one => one.spans && one.lane.process === name && one.spans.some(span => span.start === start));
    if (!row) return;
    picked = row.spans.find(span => span.start === start && Math.abs(span.end - start - length) < .2) || null;
    view.from = start - length * 1.5; view.to = start + length * 2.5; view.y = row.y - 60; clamp();
    canvas.scrollIntoView({block: "center"}); canvas.focus({preventScroll: true});
  };
};

const drawWaits = () => {
  if (!trace || !trace.waits.length) return;
  const table = element("table", {}, element("tr", {}, ...["who waited", "for whom", "in", "step"].map(text => element("th", {}, text)), element("th", {class: "number"}, "how long")));
  const shown = count => {
    for (const wait of trace.waits.slice(table.rows.length - 1, count)) {
      const row = element("tr", {tabindex: 0, title: "show it in the timeline"}, ...[wait.process, wait.peer, wait.operation, wait.step ?? ""].map(cell => element("td", {}, cell)), element("td", {class: "number"}, duration(wait.us)));
      const go = () => reveal(wait.process, wait.ts, wait.us);
      row.addEventListener("click", go);
      row.addEventListener("keydown", event => { if (event.key === "Enter") go(); });
      table.append(row);
    }
  };
  shown(10);
  const made = section("The longest waits", element("div", {class: "scroll"}, table));
  if (trace.waits.length > 10) {
    const more = element("button", {}, `all ${trace.waits.length}`);
    more.addEventListener("click", () => { shown(Infinity); more.remove(); });
    made.append(more);
  }
};

$("title").textContent = document.title;
const told = [];
if (job) told.push(`${job.roles.length} process${job.roles.length === 1 ? "" : "es"}`, `${job.ended ? "ended after" : "running for"} ${duration(job.seconds * 1e6)}`);
if (job && job.saved) told.push(`checkpoint in ${job.saved}`);
if (trace) {
  const count = trace.lanes.reduce((sum, lane) => sum + lane.spans.length / 5, 0);
  told.push(`${count.toLocaleString("en")} span${count === 1 ? "" : "s"}`, ...trace.notes);
}
$("facts").textContent = told.join(" · ");
if (trace && !trace.lanes.length) section("Timeline", element("div", {class: "soft"}, "There are no spans in this trace."));
drawMap(); drawJob(); drawSchedules(); drawTimeline(); drawWaits();
document.body.dataset.drawn = String(document.querySelectorAll("section").length);
