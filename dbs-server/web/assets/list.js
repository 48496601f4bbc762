// A list of any length: there are elements for the rows that are seen, and no others.

import { el, say } from "./dom.js";

const ROW = 28;
const { compare: names } = new Intl.Collator("en", { numeric: true });

/** `columns` are `{ key, title, kind, text(item), by(item), moves }`, of which those that `moves` change all the time. `open(item)` is
 * called for the chosen item. */
export class List {
  constructor(label, columns, open) {
    Object.assign(this, { columns, open, items: [], seen: [], at: -1, chosen: null, sort: { key: columns[0].key, down: false } });
    this.titles = columns.map((column) =>
      el("div", { role: "columnheader", class: column.kind }, el("button", { type: "button", onclick: () => this.order(column.key) }, column.title)));
    this.space = el("div", { class: "space" });
    this.body = el("div", {
      class: "rows", role: "rowgroup", onscroll: () => this.draw(),
    }, this.space);
    this.element = el("div", { class: "grid", role: "grid", tabindex: "0", "aria-label": label, onkeydown: (event) => this.key(event) },
      el("div", { class: "head", role: "rowgroup" }, el("div", { role: "row", class: "row" }, this.titles)), this.body);
    this.pool = [];
    new ResizeObserver(() => this.draw()).observe(this.body);
  }

  /** Other items, in any order. */
  set(items) {
    this.items = items;
    this.arrange();
  }

  /** The items are the same, and what is said of them may not be. */
  changed() {
    if (this.columns.find((column) => column.key === this.sort.key).moves) this.arrange();
    else this.draw();
  }

  order(key) {
    this.sort = { key, down: this.sort.key === key ? !this.sort.down : key !== this.columns[0].key };
    this.arrange();
  }

  /** Sorts anew. What is chosen stays so, and in sight where it was. */
  arrange() {
    const { by } = this.columns.find((column) => column.key === this.sort.key);
    const sign = this.sort.down ? -1 : 1;
    const under = this.seen[this.at];
    const keyed = this.items.map((item) => [by(item), item]);
    keyed.sort(([x, a], [y, b]) => {
      const order = typeof x === "string" ? names(x, y) : x - y;
      return order === 0 ? names(a.name, b.name) : sign * order;
    });
    this.seen = keyed.map(([, item]) => item);
    this.at = under ? this.seen.indexOf(under) : -1;
    this.columns.forEach((column, at) => {
      const mine = column.key === this.sort.key;
      this.titles[at].setAttribute("aria-sort", mine ? (this.sort.down ? "descending" : "ascending") : "none");
    });
    this.space.style.height = `${this.seen.length * ROW}px`;
    this.element.setAttribute("aria-rowcount", String(this.seen.length + 1));
    this.draw();
  }

  choose(item, open = true) {
    this.chosen = item;
    this.at = this.seen.indexOf(item);
    this.draw();
    if (open) this.open(item);
  }

  go(to) {
    if (this.seen.length === 0) return;
    this.at = Math.max(0, Math.min(this.seen.length - 1, to));
    const top = this.at * ROW;
    const height = this.body.clientHeight;
    if (top < this.body.scrollTop) this.body.scrollTop = top;
    if (top + ROW > this.body.scrollTop + height) this.body.scrollTop = top + ROW - height;
    this.draw();
  }

  key(event) {
    // Not those of the buttons above.
    if (event.target !== this.element) return;
    const page = Math.max(1, Math.floor(this.body.clientHeight / ROW) - 1);
    const to = {
      ArrowDown: this.at + 1, ArrowUp: this.at - 1, PageDown: this.at + page, PageUp: this.at - page, Home: 0, End: this.seen.length - 1,
    }[event.key];
    if (to !== undefined) this.go(to);
    else if ((event.key === "Enter" || event.key === " ") && this.seen[this.at]) this.choose(this.seen[this.at]);
    else return;
    event.preventDefault();
  }

  /** Shows what is in sight as it is now. */
  draw() {
    const first = Math.max(0, Math.floor(this.body.scrollTop / ROW) - 4);
    const count = Math.min(this.seen.length - first, Math.ceil(this.body.clientHeight / ROW) + 8);
    while (this.pool.length < count) this.pool.push(this.row());
    this.pool.forEach((row, index) => {
      const item = index < count ? this.seen[first + index] : undefined;
      row.element.hidden = item === undefined;
      if (item !== undefined) this.fill(row, item, first + index);
    });
    const active = this.pool.find((row) => !row.element.hidden && row.index === this.at);
    if (active) this.element.setAttribute("aria-activedescendant", active.element.id);
    else this.element.removeAttribute("aria-activedescendant");
  }

  row() {
    const cells = this.columns.map((column) => el("div", { role: "gridcell", class: column.kind }));
    const row = { cells, index: -1 };
    row.element = el("div", {
      role: "row", class: "row", id: `row-${this.pool.length}`,
      onclick: () => this.seen[row.index] && this.choose(this.seen[row.index]),
    }, cells);
    this.space.append(row.element);
    return row;
  }

  fill(row, item, index) {
    if (row.index !== index) {
      row.index = index;
      row.element.style.transform = `translateY(${index * ROW}px)`;
      row.element.setAttribute("aria-rowindex", String(index + 2));
    }
    row.element.classList.toggle("at", index === this.at);
    row.element.setAttribute("aria-selected", String(item === this.chosen));
    this.columns.forEach((column, at) => say(row.cells[at], column.text(item)));
    // What is too long for its cell.
    const name = this.columns[0].text(item);
    if (row.cells[0].title !== name) row.cells[0].title = name;
  }
}
