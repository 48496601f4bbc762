// The map of the device: what its extents hold. The server sums them up in cells, at any zoom.

import * as server from "./ask.js";
import { bytes, colour, counted, el, number, sharp } from "./dom.js";

const KINDS = [
  ["damaged", "damaged", "damage was met here since the last scrub began"],
  ["dirty", "written lately", "its checksums are not on the device yet"],
  ["shared", "shared", "held by a snapshot that others are based on"],
  ["data", "data", "of a volume, or of a snapshot that nothing is based on"],
  ["pending", "being freed", "freed, and not free for new data yet"],
  ["free", "free", ""],
];
const CELL = 14;
const CELLS_MAX = 2048;
/** Between two looks at all of it, and how many times what one takes. */
const REST_MS = 10_000;
const REST_TIMES = 100;

export class SpaceMap {
  constructor(element) {
    Object.assign(this, { map: null, cells: [], at: 0, part: null, asked: 0, due: 0, columns: 1 });
    this.canvas = el("canvas", {
      tabindex: "0", role: "application", "aria-describedby": "cell",
      onkeydown: (event) => this.key(event),
      onmousemove: (event) => this.hover(event),
      onclick: (event) => { this.hover(event); this.zoom(1 / 8); },
    });
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      this.zoom(event.deltaY < 0 ? 1 / 2 : 2);
    }, { passive: false });
    this.where = el("p", { id: "part" });
    this.cell = el("div", { id: "cell", "aria-live": "polite" });
    this.legend = el("ul", { class: "legend" });
    const button = (text, label, act) => el("button", { type: "button", "aria-label": label, onclick: act }, text);
    element.replaceChildren(
      el("div", { class: "headline" },
        el("div", {}, el("h2", {}, "Space of the device"), this.where),
        el("div", { class: "buttons" },
          button("Zoom in", "Zoom in", () => this.zoom(1 / 8)), button("Zoom out", "Zoom out", () => this.zoom(8)),
          button("All", "Show the whole device", () => this.show(null)))),
      this.legend, this.canvas, this.cell,
      el("p", { class: "quiet" }, "Arrow keys go from cell to cell, + and − zoom, a click zooms in. Each cell is a bar of what its extents hold."));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  /** Looks, if it is time to. */
  refresh(now) {
    if (now >= this.due && this.canvas.clientWidth > 0) this.load();
  }

  /** Shows a part, or all of it. */
  show(part) {
    this.part = part;
    this.at = 0;
    return this.load();
  }

  async load() {
    this.due = Infinity;
    this.asked += 1;
    const mine = this.asked;
    const begun = performance.now();
    const columns = Math.max(8, Math.floor((this.canvas.clientWidth || 900) / CELL));
    const cells = Math.min(CELLS_MAX, columns * 24);
    try {
      const map = await server.command("space.map", { ...(this.part ?? {}), cells });
      if (mine !== this.asked) return;
      this.map = map;
      this.cells = map.runs.flatMap((run) => Array(run.cells).fill(run));
      this.at = Math.min(this.at, this.cells.length - 1);
      this.columns = columns;
      this.draw();
      this.owners();
    } catch (error) {
      if (mine === this.asked) this.cell.replaceChildren(el("p", { class: "trouble" }, error.message));
    }
    const took = performance.now() - begun;
    this.due = performance.now() + Math.max(REST_MS, took * REST_TIMES);
  }

  zoom(factor) {
    const { map } = this;
    if (map === null) return;
    const middle = map.offset + (this.at + 0.5) * map.cell_size;
    const wanted = Math.max(map.length * factor, map.extent_size * 16);
    if (wanted >= map.size) {
      this.show(null);
      return;
    }
    const offset = Math.min(Math.max(0, middle - wanted / 2), map.size - wanted);
    const start = Math.floor(offset / map.extent_size) * map.extent_size;
    const before = this.part;
    this.part = { offset: start, length: Math.round(wanted) };
    if (before?.offset === start && before?.length === this.part.length) return;
    this.load().then(() => {
      this.at = Math.max(0, Math.min(this.cells.length - 1, Math.floor((middle - this.map.offset) / this.map.cell_size)));
      this.draw();
      this.owners();
    });
  }

  draw() {
    if (this.map === null || this.canvas.clientWidth === 0) return;
    this.columns = Math.max(8, Math.floor(this.canvas.clientWidth / CELL));
    const lines = Math.ceil(this.cells.length / this.columns);
    const { draw } = sharp(this.canvas, lines * CELL + 2);
    const tints = new Map(KINDS.map(([kind]) => [kind, colour(`map-${kind}`)]));
    this.cells.forEach((cell, index) => this.drawCell(draw, cell, index, tints));
    const [x, y] = this.place(this.at);
    draw.strokeStyle = colour("text");
    draw.lineWidth = 2;
    draw.strokeRect(x, y, CELL - 1, CELL - 1);
    this.tell();
  }

  place(index) {
    return [(index % this.columns) * CELL + 1, Math.floor(index / this.columns) * CELL + 1];
  }

  drawCell(draw, cell, index, tints) {
    const [left, top] = this.place(index);
    const size = CELL - 2;
    const total = KINDS.reduce((sum, [kind]) => sum + cell[kind], 0);
    let x = left;
    for (const [kind] of KINDS) {
      if (cell[kind] === 0) continue;
      // Little of something is seen all the same.
      const least = kind === "free" ? 0 : 2;
      const width = Math.min(left + size - x, Math.max(least, (cell[kind] / total) * size));
      draw.fillStyle = tints.get(kind);
      draw.fillRect(x, top, width, size);
      x += width;
    }
    if (cell.damaged > 0) {
      draw.strokeStyle = tints.get("damaged");
      draw.lineWidth = 2;
      draw.strokeRect(left + 1, top + 1, size - 2, size - 2);
    }
  }

  /** What is seen, in words. */
  tell() {
    const { map } = this;
    const sum = Object.fromEntries(KINDS.map(([kind]) => [kind, map.runs.reduce((all, run) => all + run.cells * run[kind], 0)]));
    const whole = map.length === map.size;
    const part = whole ? `all ${bytes(map.size)}` : `${bytes(map.length)} from ${bytes(map.offset)} of ${bytes(map.size)}`;
    const text = `${part}, ${bytes(map.cell_size)} in a cell, extents of ${bytes(map.extent_size)}`;
    if (this.where.textContent !== text) this.where.textContent = text;
    const words = KINDS.filter(([kind]) => sum[kind] > 0).map(([kind, name]) => `${name} ${bytes(sum[kind] * map.extent_size)}`);
    this.canvas.setAttribute("aria-label", `Map of ${part}: ${words.join(", ")}`);
    this.legend.replaceChildren(...KINDS.map(([kind, name, why]) =>
      el("li", { title: why }, el("i", { class: `key map-${kind}` }), `${name} `, el("b", {}, bytes(sum[kind] * map.extent_size)))));
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns, Home: -this.at, End: this.cells.length }[event.key];
    if (step !== undefined) this.go(this.at + step);
    else if (event.key === "+" || event.key === "=" || event.key === "Enter") this.zoom(1 / 8);
    else if (event.key === "-") this.zoom(8);
    else return;
    event.preventDefault();
  }

  hover(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / CELL);
    const line = Math.floor((event.clientY - box.top) / CELL);
    const at = line * this.columns + column;
    if (column >= 0 && column < this.columns && at >= 0 && at < this.cells.length && at !== this.at) this.go(at);
  }

  go(to) {
    if (this.map === null) return;
    this.at = Math.max(0, Math.min(this.cells.length - 1, to));
    this.draw();
    clearTimeout(this.waits);
    this.waits = setTimeout(() => this.owners(), 120);
  }

  /** Names who holds the cell. */
  async owners() {
    const { map, at } = this;
    const cell = this.cells[at];
    if (!cell) return;
    const offset = map.offset + at * map.cell_size;
    const what = KINDS.filter(([kind]) => cell[kind] > 0).map(([kind, name]) => `${name} ${number(cell[kind])}`);
    const head = el("p", {}, el("b", {}, `${bytes(offset)} + ${bytes(map.cell_size)}`), ` extents: ${what.join(", ")}`);
    if (cell.free + cell.pending === KINDS.reduce((sum, [kind]) => sum + cell[kind], 0)) {
      this.cell.replaceChildren(head, el("p", { class: "quiet" }, "nobody's"));
      return;
    }
    try {
      const found = await server.command("space.owners", { offset, length: map.cell_size });
      if (map !== this.map || at !== this.at) return;
      const name = ({ volume, snapshot }) => (snapshot === null ? volume ?? "(deleted)" : `${volume ?? "(deleted)"}@${snapshot}`);
      const owners = found.owners.map((owner) =>
        el("li", {}, el("b", {}, name(owner)), ` ${counted(owner.extents, "extent")}, the first is its ${bytes(owner.offset)}`));
      if (found.others > 0) owners.push(el("li", {}, `and ${counted(found.others, "other")}`));
      this.cell.replaceChildren(head, el("ul", {}, owners));
    } catch (error) {
      this.cell.replaceChildren(head, el("p", { class: "trouble" }, error.message));
    }
  }
}
