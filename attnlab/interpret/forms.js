// The large view of a head: as a matrix, or as edges between tokens.
// A form knows its size, what lies at a point (`hit`), and how to draw the visible part.

const LEAST = 10; // pixels that a line of letters needs

function letters(context, paint, bold = false, size = 12) {
  context.font = `${bold ? 700 : 400} ${size}px ${paint.css("mono")}`;
  context.textBaseline = "middle";
  context.direction = "ltr";
}

function line(context, x0, y0, x1, y1) {
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
}

function clear(context, paint, box) {
  context.fillStyle = paint.css("paper");
  context.fillRect(0, 0, box.width, box.height);
}

// A matrix, with query tokens at its left and key tokens above it; its corner names both. Where
// cells are too small for letters, the places are numbered instead.
class Matrix {
  constructor(context, map, space, paint) {
    letters(context, paint);
    const widest = (tokens) =>
      Math.min(112, Math.max(34, ...tokens.map((t) => context.measureText(short(t)).width))) + 14;
    const left = widest(map.tokens), top = widest(map.keys);
    const fit = (left, top) => Math.min(44, (space.width - left - 6) / map.columns,
      (space.height - top - 6) / map.rows);
    const least = fit(48, 30);
    let cell = fit(left, top);
    // A short text is worth scrolling for: its tokens can be read.
    if (cell < LEAST) cell = map.rows <= 64 ? LEAST + 2 : least;
    if (space.zoom) cell = Math.max(Math.min(least, cell), Math.min(60, cell * space.zoom));
    this.words = cell >= LEAST;
    this.flat = !this.words || top - 11 <= cell; // upright, with a pixel or two between
    this.left = this.words ? left : 48;
    this.top = this.flat ? 30 : top;
    this.cell = cell;
    this.map = map;
    this.width = this.left + cell * map.columns + 6;
    this.height = this.top + cell * map.rows + 6;
    this.step = Math.max(1, Math.ceil(1 / (cell * devicePixelRatio))); // values to a point
  }

  hit(x, y, scroll) {
    const t = Math.floor((y + scroll.y - this.top) / this.cell);
    const s = Math.floor((x + scroll.x - this.left) / this.cell);
    const row = t >= 0 && t < this.map.rows && y >= this.top;
    const column = s >= 0 && s < this.map.columns && x >= this.left;
    return { t: row ? t : null, s: column ? s : null };
  }

  draw({ context, paint, box, scroll, image, at }) {
    const { cell, left, top, map } = this;
    const x = (s) => left + s * cell - scroll.x, y = (t) => top + t * cell - scroll.y;
    const first = (offset) => Math.max(0, Math.floor(offset / cell));
    const rows = [first(scroll.y), Math.min(map.rows, first(scroll.y + box.height) + 1)];
    const columns = [first(scroll.x), Math.min(map.columns, first(scroll.x + box.width) + 1)];
    const width = cell * map.columns, height = cell * map.rows;
    clear(context, paint, box);
    context.save();
    context.beginPath();
    context.rect(left - 1, top - 1, box.width, box.height);
    context.clip();
    context.imageSmoothingEnabled = false;
    const points = [image.width * this.step, image.height * this.step];
    context.drawImage(image, x(0), y(0), cell * points[0], cell * points[1]);
    if (map.lower) {
      context.fillStyle = paint.css("sunk");
      for (let t = rows[0]; t < rows[1]; t++) {
        context.fillRect(x(t + 1), y(t), cell * (map.columns - t - 1), cell + 0.3);
      }
    }
    context.strokeStyle = paint.css("line");
    context.lineWidth = 1;
    context.strokeRect(x(0), y(0), width, height);
    if (cell >= 9) {
      context.globalAlpha = 0.6;
      context.beginPath();
      const right = x(0) + width, bottom = y(0) + height;
      for (let t = rows[0] + 1; t < rows[1]; t++) line(context, x(0), y(t), right, y(t));
      for (let s = columns[0] + 1; s < columns[1]; s++) line(context, x(s), y(0), x(s), bottom);
      context.stroke();
      context.globalAlpha = 1;
    }
    context.strokeStyle = paint.css("accent");
    context.lineWidth = 1.5;
    if (at.t !== null) context.strokeRect(x(0), y(at.t), width, Math.max(cell, 2));
    if (at.s !== null) context.strokeRect(x(at.s), y(0), Math.max(cell, 2), height);
    context.restore();
    letters(context, paint);
    context.textAlign = "right";
    context.font = "10px system-ui, sans-serif";
    context.fillStyle = paint.css("soft");
    context.fillText("key →", left - 7, top - 22);
    context.fillText("query ↓", left - 7, top - 11);
    this.label(context, paint, map.tokens, rows, at.t, (text, t) => {
      if (y(t) + cell / 2 > top) context.fillText(text, left - 7, y(t) + cell / 2);
    });
    this.label(context, paint, map.keys, columns, at.s, (text, s) => {
      if (x(s) + cell / 2 < left) return;
      context.save();
      context.translate(x(s) + cell / 2, this.flat ? top - 11 : top - 7);
      if (!this.flat) context.rotate(-Math.PI / 2);
      context.textAlign = this.flat ? "center" : "left";
      context.fillText(text, 0, 0);
      context.restore();
    });
  }

  // Every token in sight, or every so many places; the one pointed at always.
  label(context, paint, tokens, [from, to], chosen, write) {
    const { cell, words } = this;
    const every = words ? 1 : [10, 20, 50, 100, 200, 500, 1000].find((n) => n * cell > 30);
    for (let i = from; i < to; i++) {
      const here = i === chosen;
      const crowded = !words && chosen !== null && Math.abs(i - chosen) * cell < 26;
      if (!here && (i % every || crowded)) continue;
      letters(context, paint, here, words ? Math.min(12, cell) : 12);
      context.fillStyle = paint.css(here ? "accent" : words ? "ink" : "soft");
      write(words ? short(tokens[i]) : `${i}`, i);
    }
  }
}

// Two columns of tokens, with lines from query to key tokens.
class Edges {
  constructor(context, map, space) {
    this.map = map;
    this.cell = 19;
    this.top = 28;
    this.width = Math.min(space.width, 640);
    this.column = Math.min(170, this.width * 0.36);
    this.height = this.top + this.cell * Math.max(map.rows, map.columns) + 6;
  }

  hit(x, y, scroll) {
    const i = Math.floor((y + scroll.y - this.top) / this.cell);
    const left = x < this.width / 2;
    const there = i >= 0 && i < (left ? this.map.rows : this.map.columns) && y >= this.top;
    return { t: left && there ? i : null, s: !left && there ? i : null };
  }

  draw({ context, paint, box, scroll, values, at }) {
    const { map, cell, top, column, width } = this;
    const y = (i) => top + (i + 0.5) * cell - scroll.y;
    const first = Math.max(0, Math.floor(scroll.y / cell));
    const last = Math.ceil((scroll.y + box.height) / cell);
    clear(context, paint, box);
    const one = at.t !== null || at.s !== null, least = one ? 0.002 : 0.02;
    const [from, to] = at.t !== null ? [at.t, at.t + 1] : one ? [0, map.rows] : [first, last];
    for (let t = from; t < Math.min(to, map.rows); t++) {
      for (let s = 0; s < values.width(t); s++) {
        const p = values.at(t, s);
        if (Math.abs(p) < least || (at.t === null && one && s !== at.s)) continue;
        const x = paint.scale(p, values.tops[t]), size = Math.min(1, Math.abs(x));
        context.strokeStyle = paint.colour(Math.sign(x) * 0.7, size);
        context.lineWidth = 0.5 + 2 * size;
        context.beginPath();
        line(context, column + 4, y(t), width - column - 4, y(s));
        context.stroke();
      }
    }
    const cellOf = (t, s) => [values.at(t, s), values.tops[t]];
    const ofQuery = (t) => (at.t === null && at.s !== null ? cellOf(t, at.s) : null);
    const ofKey = (s) => (at.t === null ? null : cellOf(at.t, s));
    for (let i = first; i < Math.min(last, map.rows); i++) {
      this.write(context, paint, map.tokens[i], y(i), true, i === at.t, ofQuery(i));
    }
    for (let i = first; i < Math.min(last, map.columns); i++) {
      this.write(context, paint, map.keys[i], y(i), false, i === at.s, ofKey(i));
    }
    context.fillStyle = paint.css("paper");
    context.fillRect(0, 0, box.width, top - 3);
    letters(context, paint);
    context.font = "12px system-ui, sans-serif";
    context.fillStyle = paint.css("soft");
    context.textAlign = "right";
    context.fillText("query", column - 6, 14);
    context.textAlign = "left";
    context.fillText("key", width - column + 6, 14);
  }

  // A token, with its probability in the row or column that is pointed at.
  write(context, paint, token, y, left, here, cellValue) {
    const { column, width, cell } = this;
    const [p, top] = cellValue ?? [0, 0], x = paint.scale(p, top);
    const inner = left ? column : width - column, outer = left ? 2 : width - 2;
    if (cellValue) {
      context.fillStyle = paint.colour(x);
      context.fillRect(Math.min(inner, outer), y - cell / 2 + 1, column - 2, cell - 2);
    }
    const label = Math.abs(p) >= 0.002 ? p.toFixed(3) : "";
    letters(context, paint, here);
    context.fillStyle = here && !label ? paint.css("accent") : paint.ink(x);
    context.textAlign = left ? "right" : "left";
    context.fillText(short(token, 18), left ? inner - 6 : inner + 6, y, column - (label ? 56 : 10));
    context.textAlign = left ? "left" : "right";
    context.fillText(label, left ? outer + 4 : outer - 4, y);
  }
}
