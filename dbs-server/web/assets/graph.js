// Graphs of what is asked of the store or a volume, over the last minutes.

import { colour, el, sharp } from "./dom.js";

/** As many as the server keeps. */
const POINTS = 3600;
/** What can be shown, in seconds. */
const SPANS = [[180, "3 min"], [900, "15 min"], [3600, "1 h"]];
let shown = SPANS[0][0];

/** Buttons that choose how much of the past all graphs show; `draw` draws them. */
export function spans(draw) {
  const buttons = SPANS.map(([seconds, text]) => el("button", {
    type: "button", "aria-label": `Show the last ${text}`, "aria-pressed": String(seconds === shown),
    onclick: () => {
      shown = seconds;
      buttons.forEach((button, at) => button.setAttribute("aria-pressed", String(SPANS[at][0] === shown)));
      draw();
    },
  }, text));
  return el("div", { class: "buttons spans", role: "group", "aria-label": "Graphs show the last" }, buttons);
}

/** A step that a person would choose for the top of an axis. */
function top(most, base) {
  let step = 1;
  while (step * base <= most) step *= base;
  for (const part of [1, 2, 5, 10, 20, 50, 100, 200, 500]) if (step * part >= most) return step * part;
  return step * base;
}

/** Lines over time. `series` are `[name, colour]`; `text` shows a value. */
export class Graph {
  constructor(title, series, text, base) {
    Object.assign(this, { series, text, base, points: [] });
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.values = series.map(() => el("b", {}, "–"));
    const legend = series.map(([name, tint], at) =>
      el("span", {}, el("i", { class: `key ${tint}` }), `${name} `, this.values[at]));
    this.element = el("figure", { class: "panel graph" },
      el("figcaption", {}, el("h3", {}, title), el("div", { class: "legend" }, legend)), this.canvas);
  }

  clear() {
    this.points = [];
  }

  add(at, values) {
    this.points.push([at, values]);
    if (this.points.length > POINTS) this.points.shift();
  }

  draw() {
    const last = this.points.at(-1)?.[1];
    this.values.forEach((value, at) => {
      const text = last ? this.text(last[at]) : "–";
      if (value.textContent !== text) value.textContent = text;
    });
    if (!this.canvas.isConnected || this.canvas.clientWidth === 0) return;
    const { draw, width, height } = sharp(this.canvas, 96);
    const end = this.points.at(-1)?.[0] ?? 0;
    const points = this.points.filter(([at]) => at >= end - shown);
    const most = top(Math.max(1, ...points.flatMap(([, values]) => values)), this.base);
    const left = 64;
    draw.font = "11px system-ui, sans-serif";
    draw.textAlign = "right";
    draw.textBaseline = "middle";
    for (const part of [0, 0.5, 1]) {
      const y = height - 8 - part * (height - 18);
      draw.strokeStyle = colour("line");
      draw.beginPath();
      draw.moveTo(left, Math.round(y) + 0.5);
      draw.lineTo(width, Math.round(y) + 0.5);
      draw.stroke();
      draw.fillStyle = colour("quiet");
      draw.fillText(part === 0 ? "0" : this.text(most * part), left - 8, y);
    }
    this.series.forEach(([, tint], which) => {
      draw.strokeStyle = colour(tint);
      draw.lineWidth = 1.75;
      draw.lineJoin = "round";
      draw.beginPath();
      points.forEach(([at, values], index) => {
        const x = width - ((end - at) / shown) * (width - left);
        const y = height - 8 - (values[which] / most) * (height - 18);
        if (index === 0) draw.moveTo(x, y);
        else draw.lineTo(x, y);
      });
      draw.stroke();
    });
  }
}
