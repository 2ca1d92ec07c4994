"use strict";
// From the bytes of a head to numbers, to colours, and to the pictures that are drawn of them.

function decode(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

// The values of one head. Bytes: the largest size in each row (float32, little-endian), then a
// step of it per value, row by row; causal attention up to the diagonal only.
class Values {
  constructor(map, id) {
    const bytes = decode(document.getElementById(id).textContent);
    this.rows = map.rows;
    this.columns = map.columns;
    this.lower = map.lower;
    this.signed = map.signed;
    this.tops = new Float32Array(bytes.slice(0, 4 * map.rows).buffer);
    this.steps = bytes.subarray(4 * map.rows);
  }
  width(t) { return this.lower ? t + 1 : this.columns; }
  start(t) { return this.lower ? (t * (t + 1)) / 2 : t * this.columns; }
  at(t, s) {
    if (s >= this.width(t)) return 0;
    const step = this.steps[this.start(t) + s];
    return this.tops[t] * (this.signed ? (step - 128) / 127 : step / 255);
  }
}

// value, largest of its row -> how far along the colours, with the value's sign
const SCALES = {
  root: (p) => Math.sign(p) * Math.sqrt(Math.abs(p)),
  plain: (p) => p,
  row: (p, top) => (top ? p / top : 0),
};
const UNSCALED = { root: (x) => x * x, plain: (x) => x, row: (x) => x };

// Lightness of OKLCH grows evenly from the paper to the end, so equal steps look equal.
const RAMPS = {
  light: { from: 1, to: 0.3, chroma: 0.17, hue: 262, below: 40 },
  dark: { from: 0.2, to: 0.95, chroma: 0.11, hue: 225, below: 60 },
};

function oklch(lightness, chroma, hue) {
  const a = chroma * Math.cos((hue * Math.PI) / 180);
  const b = chroma * Math.sin((hue * Math.PI) / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((x) => {
    const y = x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055;
    return Math.round(255 * Math.min(1, Math.max(0, y)));
  });
}

// Colours of 0 to 1, of one sign: [256] of [r, g, b]; 0 is the paper itself.
function ramp(name, hue, paper) {
  const { from, to, chroma } = RAMPS[name];
  const at = (x) => oklch(from + (to - from) * x, chroma * Math.sin(0.75 * Math.PI * x), hue);
  return Array.from({ length: 256 }, (_, i) => (i ? at(i / 255) : paper));
}

class Paint {
  constructor(dark, scale) {
    const name = dark ? "dark" : "light";
    const style = getComputedStyle(document.documentElement);
    this.css = (variable) => style.getPropertyValue(`--${variable}`).trim();
    const paper = [1, 3, 5].map((i) => parseInt(this.css("paper").slice(i, i + 2), 16));
    this.above = ramp(name, RAMPS[name].hue, paper);
    this.below = ramp(name, RAMPS[name].below, paper);
    this.name = scale;
    this.scale = SCALES[scale];
    this.key = `${name} ${scale}`;
  }
  rgb(x) {
    const step = Math.min(255, Math.round(255 * Math.abs(x)));
    return (x < 0 ? this.below : this.above)[step];
  }
  colour(x, alpha = 1) { return `rgba(${this.rgb(x).join(",")},${alpha})`; }
  // Ink that can be read on `colour(x)`.
  ink(x) { return Math.abs(x) > 0.55 ? this.css("paper") : this.css("ink"); }
}

// A picture of all values, each point the largest of `step` x `step` of them.
function picture(values, paint, step) {
  const width = Math.ceil(values.columns / step), height = Math.ceil(values.rows / step);
  const levels = new Float32Array(width * height);
  for (let t = 0; t < values.rows; t++) {
    const top = values.tops[t], base = Math.floor(t / step) * width, start = values.start(t);
    const seen = values.width(t), unit = values.signed ? top / 127 : top / 255;
    const zero = values.signed ? 128 : 0;
    for (let s = 0; s < seen; s++) {
      const x = paint.scale((values.steps[start + s] - zero) * unit, top);
      const i = base + (step === 1 ? s : Math.floor(s / step));
      if (Math.abs(x) > Math.abs(levels[i])) levels[i] = x;
    }
  }
  const canvas = new OffscreenCanvas(width, height), context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  for (let i = 0; i < levels.length; i++) {
    const [r, g, b] = paint.rgb(levels[i]);
    image.data.set([r, g, b, 255], 4 * i);
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

function drawThumb(canvas, values, paint) {
  const size = Math.max(16, Math.round(canvas.clientWidth * devicePixelRatio));
  const step = Math.max(1, Math.ceil(Math.max(values.rows, values.columns) / size));
  const image = picture(values, paint, step);
  canvas.width = image.width;
  canvas.height = image.height;
  canvas.getContext("2d").drawImage(image, 0, 0);
}

// How a token is written: blanks, ends of lines and controls can be seen.
function shown(token, blank = "·") {
  const marks = { " ": blank, "\n": "↵", "\r": "␍", "\t": "⇥" };
  const code = (c) => `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`;
  return token.replace(/ |[\p{Cc}\p{Cs}\p{Zl}\p{Zp}]/gu, (c) => marks[c] ?? code(c)) || "∅";
}

function short(token, most = 14) {
  const letters = Array.from(shown(token));
  return letters.length > most ? letters.slice(0, most - 1).join("") + "…" : letters.join("");
}

function drawLegend(canvas, paint, signed) {
  const width = 160;
  canvas.width = width;
  canvas.height = 1;
  const context = canvas.getContext("2d");
  for (let i = 0; i < width; i++) {
    const x = i / (width - 1);
    context.fillStyle = paint.colour(signed ? 2 * x - 1 : x);
    context.fillRect(i, 0, 1, 1);
  }
}
