"use strict";
// Charts as SVG, drawn at the width that there is, and again when it changes. Text of documents only ever becomes
// text: nothing here parses markup.

const COLOUR = (name) => (name === "muted" ? "var(--muted)" : `var(--c${name})`);

function shape(parent, name, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.textContent = text;
  return parent.appendChild(element);
}

function element(parent, name, className, text = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.textContent = text;
  return parent.appendChild(made);
}

function number(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  const digits = size >= 100 || Number.isInteger(value) ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : size >= 0.01 ? 3 : 5;
  return value.toLocaleString("en", { maximumFractionDigits: digits }).replace("-", "−");
}

function tickLabel(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${number(value / 1e6)}M`;
  return size >= 1e4 ? `${number(value / 1e3)}k` : number(value);
}

/** Round numbers from low to high, about `count` of them. */
function linearTicks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(+(i * step).toPrecision(12));
  return ticks;
}

function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (decades < 0.5) return linearTicks(low, high, count);
  const factors = decades < 2 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil((decades + 1) / count));
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power += every) {
    ticks.push(...factors.map((factor) => factor * 10 ** power));
  }
  return ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
}

function nearest(values, x) {
  let low = 0, high = values.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - values[low - 1] < values[low] - x ? low - 1 : low;
}

class Chart {
  constructor(figure) {
    this.data = JSON.parse(figure.querySelector("script").textContent);
    this.drawing = figure.querySelector(".drawing");
    this.legend(figure);
    this.readout = document.createElement("div");
    this.readout.className = "readout";
    this.drawing.after(this.readout);
    this.shown = null;
    new ResizeObserver(() => this.resize()).observe(this.drawing);
    this.drawing.addEventListener("pointermove", (event) => this.point(event));
    this.drawing.addEventListener("pointerdown", (event) => this.point(event));
    if (this.data.document !== null) {
      this.drawing.addEventListener("click", (event) => {
        location.hash = `#${this.data.document}:${Math.round(this.value(event))}`;
      });
      document.addEventListener("page", (event) => {
        this.shown = event.detail.document === this.data.document ? event.detail : null;
        if (this.width) this.draw();
      });
    }
  }

  legend(figure) {
    const named = this.data.series.filter((series) => series.name);
    if (named.length < 2 && !named.some((series) => series.colour === "sign")) return;
    const legend = document.createElement("div");
    legend.className = "legend";
    for (const { name, colour } of named) {
      for (const [text, shade] of colour === "sign" ? name.split("|").map((part, i) => [part, i + 1]) : [[name, colour]]) {
        const item = element(legend, "span");
        element(item, "i").style.background = COLOUR(shade);
        item.append(text);
      }
    }
    figure.querySelector("figcaption").after(legend);
  }

  resize() {
    const width = this.drawing.clientWidth;
    if (width && width !== this.width) {
      this.width = width;
      this.draw();
    }
  }

  draw() {
    const { series, log_x: log, marks, from_zero: fromZero } = this.data;
    this.height = Math.round(Math.min(340, Math.max(210, this.width * 0.42)));
    const xs = series.flatMap(({ x }) => [x[0], x[x.length - 1]]);
    let low = fromZero ? 0 : Infinity, high = fromZero ? 0 : -Infinity;
    for (const { y, low: lows } of series) {
      for (const value of [...y, ...lows]) {
        if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
      }
    }
    if (!(high > low)) { const middle = Number.isFinite(low) ? low : 0; low = middle - (fromZero ? 0 : 1); high = middle + 1; }
    const margin = 0.04 * (high - low);
    if (!fromZero || low < 0) low -= margin;
    if (!fromZero || high > 0) high += margin;
    const yTicks = linearTicks(low, high, this.height / 55);
    const left = 10 + 7 * Math.max(...yTicks.map((tick) => tickLabel(tick).length));
    const box = { left, top: 24, right: this.width - 14, bottom: this.height - 40 };
    const [x0, x1] = [Math.min(...xs), Math.max(...xs)].map((x) => (log ? Math.log10(x) : x));
    this.scale = { log, x0, x1: x1 > x0 ? x1 : x0 + 1, box };
    const x = (value) => box.left + (((log ? Math.log10(value) : value) - x0) / (this.scale.x1 - x0)) * (box.right - box.left);
    const y = (value) => box.bottom - ((value - low) / (high - low)) * (box.bottom - box.top);
    this.x = x;

    this.drawing.replaceChildren();
    const root = shape(this.drawing, "svg", { width: this.width, height: this.height });
    if (this.data.document !== null) root.setAttribute("class", "clickable");
    shape(root, "text", { x: 0, y: 12 }, this.data.y_label);
    shape(root, "text", { x: box.right, y: this.height - 4, "text-anchor": "end" }, this.data.x_label);
    for (const tick of yTicks) {
      const colour = tick === 0 ? "var(--muted)" : "var(--line)";
      shape(root, "line", { x1: box.left, x2: box.right, y1: y(tick), y2: y(tick), stroke: colour });
      shape(root, "text", { x: box.left - 6, y: y(tick) + 4, "text-anchor": "end" }, tickLabel(tick));
    }
    const ends = log ? [10 ** x0, 10 ** x1] : [x0, x1];
    for (const tick of (log ? logTicks : linearTicks)(...ends, this.width / 90)) {
      shape(root, "line", { x1: x(tick), x2: x(tick), y1: box.bottom, y2: box.bottom + 4, stroke: "var(--muted)" });
      shape(root, "text", { x: x(tick), y: box.bottom + 17, "text-anchor": "middle" }, tickLabel(tick));
    }
    // More lines than this would be a grey area.
    if (marks.length < this.width / 8) {
      for (const mark of marks) {
        shape(root, "line", { x1: x(mark), x2: x(mark), y1: box.top, y2: box.bottom, stroke: "var(--line)", "stroke-dasharray": "2 3" });
      }
    }
    if (this.shown) {
      const from = x(this.shown.from);
      const wide = Math.max(2, x(this.shown.to) - from);
      shape(root, "rect", { x: from, y: box.top, width: wide, height: box.bottom - box.top, fill: "var(--c4)", "fill-opacity": 0.25 });
    }
    for (const one of series) this.drawSeries(root, one, x, y);
    this.rule = shape(root, "line", { y1: box.top, y2: box.bottom, stroke: "var(--ink)", "stroke-opacity": 0.5, visibility: "hidden" });
  }

  drawSeries(root, { kind, x: xs, y: ys, low, colour }, x, y) {
    if (kind === "bars") {
      // Two paths at most, however many bars.
      const paths = { 1: "", 2: "" };
      ys.forEach((value, i) => {
        if (!value) return;
        const gap = x(xs[i + 1]) - x(xs[i]) > 4 ? 1 : 0;
        paths[value < 0 ? 2 : 1] += `M${x(xs[i]).toFixed(1)},${y(0).toFixed(1)}V${y(value).toFixed(1)}H${(x(xs[i + 1]) - gap).toFixed(1)}V${y(0).toFixed(1)}Z`;
      });
      for (const [sign, d] of Object.entries(paths)) {
        if (d) shape(root, "path", { d, fill: COLOUR(colour === "sign" ? sign : colour) });
      }
      return;
    }
    const point = (i, value) => `${x(xs[i]).toFixed(1)},${y(value).toFixed(1)}`;
    if (kind === "band") {
      const there = xs.map((_, i) => i).filter((i) => ys[i] !== null && low[i] !== null);
      const d = "M" + [...there.map((i) => point(i, ys[i])), ...there.reverse().map((i) => point(i, low[i]))].join("L") + "Z";
      shape(root, "path", { d, fill: COLOUR(colour), "fill-opacity": 0.28 });
      return;
    }
    let d = "", drawing = false;
    ys.forEach((value, i) => {
      if (value !== null) d += (drawing ? "L" : "M") + point(i, value);
      drawing = value !== null;
    });
    shape(root, "path", { d, fill: "none", stroke: COLOUR(colour), "stroke-width": 2, "stroke-linejoin": "round" });
    if (xs.length <= 40) {
      ys.forEach((value, i) => {
        if (value !== null) shape(root, "circle", { cx: x(xs[i]), cy: y(value), r: 2.5, fill: COLOUR(colour) });
      });
    }
  }

  /** The horizontal value below the pointer. */
  value(event) {
    const { box, x0, x1, log } = this.scale;
    const share = (event.clientX - this.drawing.getBoundingClientRect().left - box.left) / (box.right - box.left);
    const value = x0 + Math.min(1, Math.max(0, share)) * (x1 - x0);
    return log ? 10 ** value : value;
  }

  point(event) {
    const at = this.value(event);
    const series = this.data.series;
    const place = ({ kind, x, y }) => (kind === "bars" ? Math.max(0, Math.min(x.filter((edge) => edge <= at).length, y.length) - 1) : nearest(x, at));
    const [lead] = series;
    const i = place(lead);
    const label = lead.kind === "bars" ? `${number(lead.x[i])} to ${number(lead.x[i + 1])}` : number(lead.x[i]);
    const values = series.map((one) => {
      const j = place(one);
      const name = one.colour === "sign" || series.length === 1 ? "" : `${one.name} `;
      return name + (one.kind === "band" ? `${number(one.low[j])} to ${number(one.y[j])}` : number(one.y[j]));
    });
    this.readout.textContent = `${this.data.x_label}: ${label} · ${values.join(" · ")}`;
    const x = this.x(lead.kind === "bars" ? at : lead.x[i]);
    for (const [key, value] of [["x1", x], ["x2", x], ["visibility", "visible"]]) this.rule.setAttribute(key, value);
  }
}

for (const figure of document.querySelectorAll("figure.chart")) new Chart(figure);
