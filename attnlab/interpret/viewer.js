// The page: one panel per model, each with its grid of heads, one head large, and its numbers.

const page = JSON.parse(document.getElementById("page").textContent);
const state = { view: "matrix", scale: "root", mark: "", dark: false, active: 0 };
const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

let paint;
const seen = new Map(); // thumbnail -> what draws it, of those on the screen
const waiting = new Set();
const eye = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) {
      seen.set(target, target.redraw);
      later(target.redraw);
    } else seen.delete(target);
  }
});

// Draws for some milliseconds of each frame, so that the page answers meanwhile.
function later(draw) {
  if (!waiting.size) requestAnimationFrame(work);
  waiting.add(draw);
}
function work() {
  const end = performance.now() + 12;
  for (const draw of waiting) {
    waiting.delete(draw);
    draw();
    if (performance.now() > end) break;
  }
  if (waiting.size) requestAnimationFrame(work);
}

const panels = page.panels.map((panel, index) => new Panel(panel, index));

function repaint() {
  document.documentElement.dataset.theme = state.dark ? "dark" : "light";
  byId("theme").textContent = state.dark ? "Light" : "Dark";
  paint = new Paint(state.dark, state.scale);
}

function refresh() {
  repaint();
  for (const button of byId("views").children) {
    button.setAttribute("aria-pressed", button.dataset.view === state.view);
  }
  for (const panel of panels) {
    panel.show();
    panel.explainColours();
  }
  seen.forEach(later);
}

function setView(view) {
  state.view = view;
  for (const panel of panels) panel.stage.scrollTop = panel.stage.scrollLeft = 0;
  refresh();
}

const system = matchMedia("(prefers-color-scheme: dark)");
state.dark = system.matches;
const change = (changes) => {
  Object.assign(state, changes);
  refresh();
};
system.addEventListener("change", () => change({ dark: system.matches }));
byId("theme").addEventListener("click", () => change({ dark: !state.dark }));
byId("scale").addEventListener("change", (event) => change({ scale: event.target.value }));
byId("views").addEventListener("click", ({ target }) => {
  if (target.dataset.view) setView(target.dataset.view);
});
const maps = page.panels.flatMap((panel) => panel.maps);
const names = [...new Set(maps.flatMap((map) => Object.keys(map.statistics)))];
for (const name of ["", ...names]) {
  byId("mark").append(make("option", { value: name }, name || "none"));
}
byId("mark").parentElement.hidden = !names.length;
for (const [name, description] of Object.entries(Object.assign({}, ...maps.map((m) => m.descriptions)))) {
  if (!names.includes(name)) continue;
  byId("descriptions").append(make("div", {}, make("dt", {}, name), make("dd", {}, description)));
}
byId("mark").addEventListener("change", (event) => {
  state.mark = event.target.value;
  for (const panel of panels) panel.measure();
});

const move = (layers, heads) => (panel) => {
  const layer = panel.layer + layers, head = panel.head + heads;
  if (panel.thumbs[layer]?.[head]) panel.select(layer, head, true);
};
const KEYS = {
  ArrowLeft: move(0, -1),
  ArrowRight: move(0, 1),
  ArrowUp: move(-1, 0),
  ArrowDown: move(1, 0),
  m: () => setView("matrix"),
  e: () => setView("edges"),
  t: () => setView("text"),
  j: (panel) => panel.step(1),
  k: (panel) => panel.step(-1),
  "+": (panel) => panel.larger(1.25),
  "=": (panel) => panel.larger(1.25),
  "-": (panel) => panel.larger(0.8),
  0: (panel) => panel.larger(0),
  Escape: (panel) => panel.pointAt(null, null),
};
document.addEventListener("keydown", (event) => {
  const plain = !(event.ctrlKey || event.metaKey || event.altKey);
  if (!plain || !KEYS[event.key] || event.target.tagName === "SELECT") return;
  event.preventDefault();
  KEYS[event.key](panels[state.active]);
});

byId("panels").classList.toggle("two", panels.length > 1);
byId("panels").append(...panels.map((panel) => panel.element));
repaint();
for (const panel of panels) panel.choose(0);
refresh();
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  refresh();
});
