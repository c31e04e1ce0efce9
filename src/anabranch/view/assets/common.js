const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

const bytes = n => {
  for (const [size, unit] of [[1 << 30, "GiB"], [1 << 20, "MiB"], [1024, "KiB"]])
    if (n >= size) return (n / size).toFixed(n >= 100 * size ? 0 : 1) + " " + unit;
  return Math.round(n) + " B";
};
const duration = us => us >= 6e7 ? (us / 6e7).toFixed(1) + " min" : us >= 1e6 ? (us / 1e6).toFixed(2) + " s"
  : us >= 1e3 ? (us / 1e3).toFixed(us >= 1e5 ? 0 : 2) + " ms" : us.toFixed(us >= 100 ? 0 : 1) + " µs";
const number = x => x === 0 ? "0" : Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3 ? x.toExponential(2)
  : String(Number(x.toPrecision(4)));

// Elements are made of text nodes alone: nothing in the data is ever read as HTML, and as SVG only our own pictures.
const element = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  made.append(...children.map(child => child instanceof Node ? child : String(child)));
  return made;
};
const drawn = (parent, tag, attributes, text) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  return parent.appendChild(made);
};
const shortened = (text, most) => text.length > most ? text.slice(0, most - 1) + "…" : text;

const tip = document.body.appendChild(element("div", {class: "tip", role: "status"}));
const showTip = (event, title, rows) => {
  tip.replaceChildren(element("b", {}, title), ...rows.map(row => element("div", {class: "soft"}, row)));
  tip.style.display = "block";
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 16, innerHeight - tip.offsetHeight - 8)) + "px";
};
const hideTip = () => { tip.style.display = "none"; };

// A canvas at the screen's own resolution; draw(context, width, height) is called at most once a frame.
const canvasOf = (canvas, draw) => {
  let asked = false;
  const now = () => {
    asked = false;
    const box = canvas.getBoundingClientRect(), ratio = devicePixelRatio || 1;
    if (!box.width || !box.height) return;
    canvas.width = Math.round(box.width * ratio); canvas.height = Math.round(box.height * ratio);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    draw(context, box.width, box.height);
  };
  const redraw = () => { if (!asked) { asked = true; requestAnimationFrame(now); } };
  redraw.now = now;
  new ResizeObserver(redraw).observe(canvas);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  return redraw;
};

// Mouse, wheel, touch and pinch on a canvas, told as move(dx, dy), zoom(factor, x, y), click(x, y, event), hover(x, y, event).
const gestures = (canvas, told) => {
  const held = new Map();
  let moved = 0;
  const place = event => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
  const spread = () => { const [[ax, ay], [bx, by]] = held.values(); return [Math.hypot(ax - bx, ay - by), (ax + bx) / 2, (ay + by) / 2]; };
  canvas.addEventListener("pointerdown", event => { canvas.setPointerCapture(event.pointerId); held.set(event.pointerId, place(event)); if (held.size === 1) moved = 0; });
  canvas.addEventListener("pointermove", event => {
    const [x, y] = place(event), before = held.get(event.pointerId);
    if (!before) { told.hover(x, y, event); return; }
    hideTip();
    if (held.size === 1) {
      moved += Math.abs(x - before[0]) + Math.abs(y - before[1]);
      told.move(x - before[0], y - before[1]);
      held.set(event.pointerId, [x, y]);
    } else {
      const [was, wasX, wasY] = spread();
      held.set(event.pointerId, [x, y]);
      const [is, isX, isY] = spread();
      moved = 99;
      told.move(isX - wasX, isY - wasY);
      if (was > 0) told.zoom(is / was, isX, isY);
    }
  });
  const end = event => {
    const was = held.delete(event.pointerId);
    if (was && event.type === "pointerup" && !held.size && moved < 6) told.click(...place(event), event);
  };
  canvas.addEventListener("pointerup", end);
  canvas.addEventListener("pointercancel", end);
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("wheel", event => {
    if (told.wheel && !told.wheel(event)) return;
    event.preventDefault();
    told.zoom(Math.exp(-event.deltaY / 400), ...place(event));
  }, {passive: false});
};
