// One model on the page: its grid of heads, one head large, and its numbers.

const number = (value) => {
  if (value === null) return "–";
  const size = Math.abs(value);
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 0.1 ? 2 : 3;
  return value.toFixed(digits).replace("-", "−");
};
const listed = (items) =>
  items.length < 2 ? items.join("") : `${items.slice(0, -1).join(", ")} and ${items.at(-1)}`;
const layersOf = (some) => `layer${some.length > 1 ? "s" : ""} ${listed(some)}`;

function range(rows) {
  const values = rows.flat().filter((value) => value !== null);
  return [Math.min(...values), Math.max(...values)];
}
// Where a value lies from the least to the most, in percent.
const place = (value, [low, high]) => (100 * (value - low)) / (high - low || 1);

class Panel {
  constructor(panel, index) {
    Object.assign(this, { maps: panel.maps, index, part: 0, layer: 0, head: 0, zoom: 0 });
    this.at = { t: null, s: null, held: false };
    this.kept = new Map(); // what is decoded
    this.parts = make("div", { class: "choice", role: "group", "aria-label": "which attention" });
    panel.maps.forEach((map, part) => {
      this.parts.append(make("button", { onclick: () => this.choose(part) }, map.name));
    });
    this.parts.hidden = panel.maps.length < 2;
    this.grid = make("div", { class: "grid", onpointerleave: () => this.light(this.layer) });
    this.title = make("h3");
    this.shares = make("p", { class: "shares" });
    this.canvas = make("canvas", {
      onpointermove: (event) => event.pointerType !== "touch" && this.point(event, false),
      onpointerleave: () => this.at.held || this.pointAt(null, null),
      onclick: (event) => this.point(event, true),
    });
    this.extent = make("div", {}, this.canvas);
    this.stage = make("div", { class: "stage", onscroll: () => this.draw() }, this.extent);
    this.words = make("div", {
      class: "words", onpointerleave: () => this.at.held || this.pointAt(null, null),
    });
    this.readout = make("div", { class: "readout", "aria-live": "polite" });
    this.legend = make("div", { class: "legend soft" });
    this.facts = make("div", { class: "facts" });
    const zooms = [["−", 0.8, "zoom out"], ["all", 0, "fit"], ["+", 1.25, "zoom in"]];
    this.zooms = make("span", { class: "zoom" }, ...zooms.map(([text, by, title]) =>
      make("button", { title, onclick: () => this.larger(by) }, text)));
    this.element = make(
      "section",
      { class: "panel", "aria-label": panel.name || "model", onpointerdown: () => this.activate() },
      make("div", { class: "top" },
        make("h2", {}, panel.name), make("p", { class: "about" }, panel.description), this.parts),
      make("div", { class: "heads" }, this.grid),
      make("div", { class: "head" },
        make("div", { class: "headline" }, this.title, this.zooms),
        this.shares, this.legend, this.stage, this.words, this.readout),
      this.facts,
    );
  }

  get map() { return this.maps[this.part]; }
  get groups() { return Object.values(this.map.plan)[0] ?? []; }
  activate() { state.active = this.index; }

  values(layer = this.layer, head = this.head) {
    const id = `v${this.index}-${this.part}-${layer}-${head}`;
    if (!this.kept.has(id)) this.kept.set(id, new Values(this.map, id));
    return this.kept.get(id);
  }

  // The layers that use the same parameters as this one, itself among them.
  mates(layer) {
    const same = (l) => l === layer || (this.groups.length && this.groups[l] === this.groups[layer]);
    return [...this.thumbs.keys()].filter(same);
  }

  choose(part) {
    const { layer, head } = this;
    this.part = part;
    this.at = { t: null, s: null, held: false };
    [...this.parts.children].forEach((b, i) => b.setAttribute("aria-pressed", i === part));
    this.build();
    this.select(Math.min(layer, this.map.layers - 1), Math.min(head, this.map.heads - 1));
    this.explainColours();
  }

  // The grid of small pictures; each is drawn when it is seen.
  build() {
    const { map, groups } = this;
    const shared = new Set(groups).size < groups.length;
    for (const thumb of this.grid.querySelectorAll(".thumb")) {
      eye.unobserve(thumb);
      seen.delete(thumb);
    }
    const least = map.heads > 16 ? 26 : 18;
    const columns = `max-content repeat(${map.heads}, minmax(${least}px, 76px))`;
    this.grid.style.gridTemplateColumns = columns;
    const corner = make("span", { class: "corner" }, "head →", make("br"), "layer ↓");
    this.grid.replaceChildren(corner);
    for (let n = 0; n < map.heads; n++) {
      this.grid.append(make("span", { class: "number" }, `${n}`));
    }
    this.rows = [];
    this.thumbs = [];
    for (let l = 0; l < map.layers; l++) {
      const set = shared ? make("span", { class: "group" }, `group ${groups[l]}`) : "";
      this.rows.push(make("span", { class: "row" }, `${l}`, set));
      this.thumbs.push([...Array(map.heads).keys()].map((n) => this.thumb(l, n)));
      this.grid.append(this.rows[l], ...this.thumbs[l]);
    }
    this.measure();
  }

  thumb(layer, head) {
    const canvas = make("canvas"), bar = make("i");
    const thumb = make("button", {
      class: "thumb", tabindex: -1, "aria-label": `layer ${layer}, head ${head}`,
      "aria-pressed": false,
      onclick: () => this.select(layer, head, true),
      onpointerenter: () => this.light(layer, head),
    }, canvas, make("span", { class: "bar" }, bar));
    thumb.redraw = () => drawThumb(canvas, this.values(layer, head), paint);
    thumb.bar = bar;
    eye.observe(thumb);
    return thumb;
  }

  // The bars under the small pictures.
  measure() {
    const rows = this.map.statistics[state.mark];
    const ends = rows ? range(rows) : [0, 1];
    this.thumbs.forEach((row, l) => row.forEach((thumb, n) => {
      const value = rows ? rows[l][n] : null;
      thumb.bar.parentElement.hidden = !rows;
      thumb.bar.style.width = `${value === null ? 0 : place(value, ends)}%`;
      thumb.title = rows ? `${state.mark} ${number(value)}` : "";
    }));
  }

  // Highlights layers with the same parameters, and this head in them.
  light(layer, head = this.head) {
    const mates = this.mates(layer);
    const lit = (l) => mates.length > 1 && mates.includes(l);
    this.rows.forEach((row, l) => row.classList.toggle("lit", lit(l)));
    this.thumbs.forEach((row, l) => row.forEach((thumb, n) =>
      thumb.classList.toggle("lit", n === head && lit(l))));
  }

  select(layer, head, moved = false) {
    const before = this.thumbs[this.layer]?.[this.head];
    before?.setAttribute("aria-pressed", false);
    if (before) before.tabIndex = -1;
    Object.assign(this, { layer, head });
    const thumb = this.thumbs[layer][head];
    thumb.setAttribute("aria-pressed", true);
    thumb.tabIndex = 0;
    if (moved && this.grid.contains(document.activeElement)) thumb.focus({ preventScroll: true });
    if (moved) thumb.scrollIntoView({ block: "nearest", inline: "nearest" });
    this.light(layer);
    this.title.textContent = `Layer ${layer}, head ${head}`;
    this.shares.textContent = this.sharing(layer);
    this.tabulate();
    this.image = null;
    this.show();
    if (moved) for (const other of panels) if (other !== this) other.follow(this);
  }

  // The same head of the other model, where it has one.
  follow(panel) {
    const there = panel.layer < this.map.layers && panel.head < this.map.heads;
    if (this.part === panel.part && there) this.select(panel.layer, panel.head);
  }

  // Which parameters a layer uses, by sublayer.
  sharing(layer) {
    const sentences = Object.entries(this.map.plan).map(([part, groups]) => {
      const group = groups[layer];
      if (typeof group === "string") return `${part}: keys and values of layer ${group.slice(1)}`;
      const also = [...groups.keys()].filter((l) => l !== layer && groups[l] === group);
      if (!also.length) return `${part}: parameters not shared`;
      return `${part}: group ${group}, shared with ${layersOf(also)}`;
    });
    return sentences.join(" · ");
  }

  tabulate() {
    const rows = Object.entries(this.map.statistics).map(([name, all]) => {
      const value = all[this.layer][this.head], ends = range(all), known = value !== null;
      const mark = known ? make("i", { style: `left:${place(value, ends)}%` }) : "";
      return make("tr", {},
        make("th", { scope: "row", title: this.map.descriptions[name] ?? null }, name),
        make("td", { class: "value" }, number(value)),
        make("td", {}, known ? make("span", { class: "place" }, mark) : ""),
        make("td", { class: "range" }, known ? ends.map(number).join(" to ") : ""));
    });
    const titles = make("tr", {}, make("th", {}, "statistic"), make("th", {}, "this head"),
      make("th", { colspan: 2 }, "range over heads"));
    this.facts.replaceChildren(rows.length ? make("table", {}, titles, ...rows) : "");
  }

  // The large picture, made anew: for another head, view, size or colour.
  show() {
    const text = state.view === "text";
    this.stage.hidden = text;
    this.words.hidden = !text;
    this.zooms.hidden = state.view !== "matrix";
    this.ahead.hidden = state.view !== "matrix" || !this.map.lower;
    if (text) this.write();
    else this.lay();
    this.paint();
    this.explain();
  }
  ahead = make("span", {}, "shaded: later tokens, masked");

  lay() {
    const width = this.stage.parentElement.clientWidth - 2;
    const most = Math.max(260, Math.min(720, innerHeight * 0.82));
    const context = this.canvas.getContext("2d"), space = { width, height: most, zoom: this.zoom };
    const Form = state.view === "edges" ? Edges : Matrix;
    this.form = new Form(context, this.map, space, paint);
    const { form } = this;
    this.box = { width: Math.min(width, form.width), height: Math.min(most, form.height) };
    const set = (element, size) => Object.assign(element.style, {
      width: `${size.width}px`, height: `${size.height}px`,
    });
    const bars = { x: form.height > most ? 16 : 0, y: form.width > width ? 16 : 0 };
    const outer = { width: this.box.width + 2 + bars.x, height: this.box.height + 2 + bars.y };
    set(this.stage, { width: Math.min(width + 2, outer.width), height: outer.height });
    set(this.extent, form);
    set(this.canvas, this.box);
    this.canvas.width = Math.round(this.box.width * devicePixelRatio);
    this.canvas.height = Math.round(this.box.height * devicePixelRatio);
  }

  // What depends on the token pointed at.
  paint() {
    if (state.view === "text") this.colour();
    else this.draw();
  }

  draw() {
    const { form } = this, context = this.canvas.getContext("2d");
    const key = `${paint.key} ${form.step}`;
    if (form.step && this.image?.key !== key) {
      this.image = picture(this.values(), paint, form.step);
      this.image.key = key;
    }
    context.setTransform(devicePixelRatio, 0, 0, devicePixelRatio, 0, 0);
    form.draw({
      context, paint, box: this.box, values: this.values(), image: this.image, at: this.at,
      scroll: { x: this.stage.scrollLeft, y: this.stage.scrollTop },
    });
  }

  // The query tokens as a text and, where they differ, the key tokens.
  write() {
    const { map } = this;
    const same = (token, i) => token === map.keys[i];
    this.alike = map.rows === map.columns && map.tokens.every(same);
    const pair = (isQuery, i) => (isQuery ? [i, null] : [null, i]);
    const spans = (tokens, isQuery) => tokens.map((token, i) => make("span", {
      onpointerenter: (event) => {
        if (event.pointerType !== "touch" && !this.at.held) this.pointAt(...pair(isQuery, i));
      },
      onclick: () => {
        const again = this.at.held && (isQuery ? this.at.t : this.at.s) === i;
        this.pointAt(...pair(isQuery, i), !again);
      },
    }, shown(token, " ")));
    const lines = (spans, tokens) =>
      spans.flatMap((span, i) => (tokens[i].includes("\n") ? [span, make("br")] : [span]));
    this.querySpans = spans(map.tokens, true);
    this.keySpans = this.alike ? this.querySpans : spans(map.keys, false);
    const note = (text) => make("p", { class: "soft" }, text);
    this.words.replaceChildren(
      note(this.alike ? "Point at a token to colour what it attends to." : "Query tokens:"),
      make("p", {}, ...lines(this.querySpans, map.tokens)));
    if (this.alike) return;
    this.words.append(note("Key tokens:"), make("p", {}, ...lines(this.keySpans, map.keys)));
  }

  colour() {
    const { at } = this, values = this.values();
    const set = (span, p, top, here) => {
      const x = p === null ? 0 : paint.scale(p, top);
      span.style.background = x ? paint.colour(x) : "";
      span.style.color = x ? paint.ink(x) : "";
      span.title = p === null ? "" : number(p);
      span.className = here ? "here" : "";
    };
    this.keySpans.forEach((span, s) => {
      const p = at.t === null ? null : values.at(at.t, s);
      set(span, p, values.tops[at.t ?? 0], s === (this.alike ? at.t : at.s));
    });
    if (!this.alike) this.querySpans.forEach((span, t) => {
      const p = at.s === null ? null : values.at(t, at.s);
      set(span, p, values.tops[t], t === at.t);
    });
  }

  point(event, hold) {
    if (!hold && this.at.held) return;
    const box = this.canvas.getBoundingClientRect();
    const scroll = { x: this.stage.scrollLeft, y: this.stage.scrollTop };
    const { t, s } = this.form.hit(event.clientX - box.left, event.clientY - box.top, scroll);
    const again = this.at.held && this.at.t === t && this.at.s === s;
    if (hold && (again || (t === null && s === null))) this.pointAt(null, null);
    else this.pointAt(t, s, hold);
  }

  // Points at a query token, a key token, or both, in all panels with the same text.
  pointAt(t, s, held = false) {
    const size = (panel) => `${panel.map.tokens.length} ${panel.map.keys.length}`;
    for (const panel of panels) {
      const same = panel.at.t === t && panel.at.s === s && panel.at.held === held;
      if (same || (panel !== this && size(panel) !== size(this))) continue;
      panel.at = { t, s, held };
      panel.paint();
      panel.explain();
    }
  }

  // Selects the next query token and scrolls to it.
  step(by) {
    const last = this.map.tokens.length - 1, from = this.at.t ?? (by > 0 ? -1 : 0);
    const t = Math.max(0, Math.min(last, from + by));
    this.pointAt(t, null, true);
    if (state.view === "text") return this.querySpans[t].scrollIntoView({ block: "nearest" });
    const { cell, top } = this.form, end = (t + 1) * cell + top - this.box.height;
    if (t * cell < this.stage.scrollTop) this.stage.scrollTop = t * cell;
    if (end > this.stage.scrollTop) this.stage.scrollTop = end;
  }

  larger(by) {
    this.zoom = by ? (this.zoom || 1) * by : 0;
    this.show();
  }

  // In words: what attends to what, and how much.
  explain() {
    const { map } = this, { t, s } = this.at, values = this.values();
    const name = (tokens, i) => make("bdi", {}, shown(tokens[i]));
    const most = (pairs, tokens) => pairs
      .filter(([p]) => Math.abs(p) >= 0.0005)
      .sort((a, b) => Math.abs(b[0]) - Math.abs(a[0]))
      .slice(0, 6)
      .flatMap(([p, i]) => [make("span", {}, name(tokens, i), ` ${i}: ${p.toFixed(3)}`), " "]);
    const lines = [];
    if (t !== null && s !== null) {
      const p = map.lower && s > t ? "masked, a later token" : values.at(t, s).toFixed(3);
      lines.push(make("div", {},
        name(map.tokens, t), ` ${t} attends to `, name(map.keys, s), ` ${s}: `, make("b", {}, p)));
    }
    if (t !== null) {
      const all = Array.from({ length: values.width(t) }, (_, i) => [values.at(t, i), i]);
      const largest = most(all, map.keys);
      lines.push(make("div", {}, name(map.tokens, t), ` ${t} attends most to `, ...largest));
    } else if (s !== null) {
      const all = map.tokens.map((_, i) => [values.at(i, s), i]);
      const largest = most(all, map.tokens);
      lines.push(make("div", {}, name(map.keys, s), ` ${s} is attended to most by `, ...largest));
    } else lines.push("Point at a token or a cell to read its numbers; a click selects it.");
    this.readout.replaceChildren(...lines);
  }

  explainColours() {
    const bar = make("canvas"), { signed } = this.map;
    drawLegend(bar, paint, signed);
    const ticks = (signed ? [-1, -0.5, 0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1]).map((x) => {
      const p = Math.sign(x) * UNSCALED[state.scale](Math.abs(x));
      const left = 100 * (signed ? (x + 1) / 2 : x);
      return make("i", { style: `left:${left}%` }, `${+p.toFixed(2)}`.replace("-", "−"));
    });
    const row = state.scale === "row" ? ", divided by the largest of its row" : "";
    const unit = `attention probability p${row}`;
    this.legend.replaceChildren(make("div", {}, bar, ...ticks), unit, this.ahead);
  }
}
