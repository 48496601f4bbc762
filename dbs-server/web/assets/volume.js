// One volume: its facts, the tree of its snapshots and clones, and what may be done with them.

import * as server from "./ask.js";
import { ask } from "./dialog.js";
import { bytes, clock, counted, el, facts, few, minute, rate, say, table, time } from "./dom.js";
import { Graph } from "./graph.js";

/** Rows of a tree that are shown at first. */
const ROWS = 500;
/** A volume is asked for again when something in the store has changed, but not sooner than so, and not for more than a
 * hundredth of the time. */
const AGAIN_MS = 3000;
/** Names of clones in a question. */
const NAMES = 5;

/**
 * The snapshots of a volume and what is based on them, newest first: `{ level, kind, name, snapshot }`. What branches off a
 * snapshot follows it, one level further in.
 */
export function tree(volume, snapshots) {
  const own = new Map(snapshots.map((snapshot) => [`${volume.name}@${snapshot.name}`, snapshot]));
  const based = new Map();
  const add = (parent, node) => {
    if (based.has(parent)) based.get(parent).push(node);
    else based.set(parent, [node]);
  };
  const root = (parent) => (own.has(parent) ? parent : null);
  for (const [name, snapshot] of own) {
    add(root(snapshot.parent), { kind: "snapshot", name, snapshot });
    for (const child of snapshot.children) {
      if (!own.has(child) && child !== volume.name) add(name, { kind: "clone", name: child });
    }
  }
  add(root(volume.parent), { kind: "head", name: volume.name });
  // From the head down: the line that everything else branches off.
  const main = new Set([volume.name]);
  for (let at = root(volume.parent); at !== null; at = root(own.get(at).parent)) main.add(at);
  const next = (children) => children.find((node) => main.has(node.name)) ?? children.find((node) => node.kind === "snapshot");
  const rows = [];
  // What comes first is at the end.
  const left = [];
  const begin = (nodes, level) => {
    const last = next(nodes);
    const rest = nodes.filter((node) => node !== last);
    for (const node of last ? [...rest, last] : rest) left.push({ node, level, line: true });
  };
  begin(based.get(null) ?? [], 0);
  while (left.length > 0) {
    const { node, level, line } = left.pop();
    if (!line) {
      rows.push({ ...node, level });
      continue;
    }
    for (let at = node; at; ) {
      const children = at.kind === "snapshot" ? based.get(at.name) ?? [] : [];
      const straight = next(children);
      begin(children.filter((child) => child !== straight), level + 1);
      left.push({ node: at, level });
      at = straight;
    }
  }
  return rows;
}

export class VolumeView {
  /** `go(name)` shows another volume; `changed()` is told that something was changed. */
  constructor(element, go, changed) {
    Object.assign(this, { element, go, changed, item: null, admin: false, all: false, asked: 0, usages: new Map(), measures: 0, sequence: 0 });
    this.graph = new Graph("Throughput", [["read", "read"], ["written", "write"]], rate, 1024);
    this.requests = new Graph("Requests", [["reads", "read"], ["writes", "write"]], (count) => `${few(count)}/s`, 10);
    this.none();
  }

  none() {
    this.item = null;
    this.measures += 1;
    this.element.replaceChildren(el("p", { class: "empty" }, "Choose a volume: its snapshots, its clones, and what each of them costs are shown here."));
  }

  open(item, admin) {
    if (item !== this.item) {
      this.graph.clear();
      this.requests.clear();
      this.all = false;
      this.usages = new Map();
      this.measured = null;
      this.measures += 1;
      this.measuring = false;
    }
    const same = item === this.item && admin === this.admin && this.tree?.isConnected;
    Object.assign(this, { item, admin });
    if (same) {
      this.showHead();
      return this.load();
    }
    this.head = el("div", { class: "headline" });
    this.facts = el("dl", { class: "facts" });
    this.tree = el("div", { class: "tree" }, el("p", { class: "empty" }, "Asking …"));
    this.element.replaceChildren(this.head, this.facts, el("div", { class: "pair" }, this.graph.element, this.requests.element), this.tree);
    this.showHead();
    return this.load();
  }

  add(at, { read, write, reads, writes }) {
    this.graph.add(at, [read, write]);
    this.requests.add(at, [reads, writes]);
  }

  draw() {
    if (this.item === null) return;
    this.graph.draw();
    this.requests.draw();
  }

  button(text, label, act, danger = false) {
    return el("button", { type: "button", class: danger ? "danger" : "", "aria-label": label, onclick: act }, text);
  }

  showHead() {
    const { item } = this;
    const buttons = [this.button("Look again", `Look again at ${item.name}`, () => this.load())];
    if (this.admin) {
      buttons.push(
        this.button("Snapshot", `Take a snapshot of ${item.name}`, () => this.take()),
        this.button("Delete", `Delete volume ${item.name}`, () => this.deleteVolume(), true));
    }
    this.head.replaceChildren(
      el("div", {}, el("h2", {}, item.name), el("p", { class: "quiet" }, item.uuid)),
      el("div", { class: "buttons" }, buttons));
  }

  /** Something may have changed since a commit of the store. */
  follow(sequence) {
    if (this.state) say(this.state, this.stateText());
    if (sequence === this.sequence || this.loading || performance.now() < this.next) return;
    this.sequence = sequence;
    this.load();
  }

  /** Asks for what costs the store nothing: not how much space it is. */
  async load() {
    const { item } = this;
    this.asked += 1;
    const mine = this.asked;
    const begun = performance.now();
    this.loading = true;
    try {
      const volume = await server.command("volume.show", { volume: item.name, usage: false });
      const snapshots = await server.command("snapshot.list", { volume: item.name, usage: false });
      if (mine !== this.asked || item !== this.item) return;
      if (volume.uuid !== item.uuid) throw new Error(`Another volume is called ${item.name} now.`);
      Object.assign(this, { volume, snapshots, when: new Date() });
      this.show();
    } catch (error) {
      if (mine !== this.asked) return;
      this.shown = "";
      this.tree.replaceChildren(el("p", { class: "trouble", role: "alert" }, error.message));
    } finally {
      if (mine === this.asked) {
        const now = performance.now();
        this.loading = false;
        this.next = now + Math.max(AGAIN_MS, 100 * (now - begun));
      }
    }
  }

  /** Measures the space of the volume and of its snapshots, one after the other, or stops that. */
  async measure() {
    this.measures += 1;
    const mine = this.measures;
    this.measuring = !this.measuring;
    this.failed = "";
    this.show();
    if (!this.measuring) return;
    const { volume, snapshots } = this;
    const current = () => mine === this.measures;
    try {
      this.usages.set(volume.uuid, (await server.command("volume.show", { volume: volume.name })).usage);
      for (const { name, uuid } of [...snapshots].reverse()) {
        if (!current()) return;
        this.measured = new Date();
        this.show();
        // One that goes meanwhile is not there.
        const found = await server.command("snapshot.show", { volume: volume.name, snapshot: name }).catch((error) => {
          if (error.status !== 404) throw error;
        });
        if (found?.uuid === uuid) this.usages.set(uuid, found.usage);
      }
    } catch (error) {
      if (current()) this.failed = error.message;
    }
    if (!current()) return;
    this.measured = new Date();
    this.measuring = false;
    this.show();
  }

  stateText() {
    const { item } = this;
    return item.rebuilding ? "being filled" : item.encryption?.locked ? "locked" : item.open ? "in use" : "idle";
  }

  show() {
    const { volume } = this;
    const usage = this.usages.get(volume.uuid);
    const size = (key) => (usage ? bytes(usage[key]) : "–");
    if (this.asOf?.isConnected) say(this.asOf, this.asOfText());
    // Else a button loses the focus.
    const shown = JSON.stringify([volume, this.snapshots, [...this.usages], this.measuring, this.admin, this.all]);
    if (shown === this.shown && this.tree.querySelector("table")) return;
    this.shown = shown;
    this.state = el("span", {}, this.stateText());
    const limits = volume.limits ? `${few(volume.limits.iops)} requests/s, ${rate(volume.limits.bandwidth)}` : null;
    this.facts.replaceChildren(...facts([
      ["Size", bytes(volume.size)],
      ["Data", size("referenced")],
      ["Nowhere else", size("exclusive")],
      ["On the device", size("allocated")],
      ["Deleting frees", size("reclaimable")],
      ["State", this.state],
      ["Made", minute(volume.created_ns)],
      ["Cloned from", volume.origin ? this.link(volume.origin) : null],
      ["Encrypted", volume.encryption ? `a ${volume.encryption.secret} unlocks it` : null],
      ["Limits", limits],
      ["Rests on", volume.backing ?? null],
    ]));
    this.showTree();
  }

  asOfText() {
    const failed = this.failed ? ` ${this.failed}` : "";
    const measured = this.measured ? `, space as it was measured until ${clock(this.measured)}` : "";
    return `Tree: ${counted(this.snapshots.length, "snapshot")}, as of ${clock(this.when)}${measured}.${failed}`;
  }

  /** A name of a volume or snapshot, which leads there. */
  link(spec) {
    const name = spec.split("@")[0];
    if (name === "(hidden)") return el("span", { class: "quiet" }, "(deleted)");
    return el("button", { type: "button", class: "link", onclick: () => this.go(name) }, spec);
  }

  showTree() {
    const rows = tree(this.volume, this.snapshots);
    const shown = this.all ? rows : rows.slice(0, ROWS);
    const columns = [["Name", "name"], ["Taken", "time"], ["Data", "num"], ["Nowhere else", "num"], ["Deleting frees", "num"]];
    if (this.admin) columns.push(["Change", "acts"]);
    const body = table(`Snapshots and clones of ${this.volume.name}`, columns, shown.map((row) => this.treeRow(row)));
    const more = shown.length < rows.length
      ? el("button", { type: "button", onclick: () => { this.all = true; this.show(); } }, `Show all ${rows.length}`) : null;
    this.asOf = el("h3", {}, this.asOfText());
    const measure = this.button(this.measuring ? "Stop measuring" : "Measure space", `Measure the space of ${this.volume.name}`, () => this.measure());
    this.tree.replaceChildren(el("div", { class: "bar" }, this.asOf, measure), body, ...(more ? [more] : []));
  }

  treeRow({ level, kind, name, snapshot }) {
    const mark = { head: "●", snapshot: "○", clone: "◇" }[kind];
    const title = kind === "snapshot" ? snapshot.name : kind === "head" ? "now" : this.link(name);
    const marks = [];
    if (kind === "clone") marks.push("clone");
    if (snapshot?.protected) marks.push("protected");
    if (snapshot && !snapshot.user_created) marks.push("system");
    if (snapshot?.retired) marks.push("retired");
    marks.push(...Object.entries(snapshot?.labels ?? {}).map(([key, value]) => (value === "" ? key : `${key}=${value}`)));
    const head = kind === "head";
    const parent = snapshot?.parent ?? (head ? this.volume.parent : null);
    // The marks show it, and a screen reader is told.
    const based = parent ? [el("span", { class: "unseen" }, `based on ${parent}`)] : [];
    const cell = el("span", { class: `node level-${Math.min(level, 6)} ${kind}` },
      el("i", { "aria-hidden": "true" }, mark), title, marks.map((text) => el("small", {}, text)), based);
    const usage = snapshot && this.usages.get(snapshot.uuid);
    const size = (key) => (usage ? bytes(usage[key]) : snapshot ? "–" : "");
    const row = [cell, snapshot ? minute(snapshot.created_ns) : "", size("referenced"), size("exclusive"), size("reclaimable")];
    if (this.admin) row.push(snapshot ? this.acts(snapshot) : "");
    return row;
  }

  acts(snapshot) {
    const name = `${snapshot.volume}@${snapshot.name}`;
    return el("div", { class: "buttons" },
      this.button("Clone", `Clone ${name}`, () => this.clone(snapshot)),
      this.button("Roll back", `Roll back to ${name}`, () => this.rollBack(snapshot)),
      this.button("Delete", `Delete snapshot ${name}`, () => this.deleteSnapshot(snapshot), true));
  }

  async run(method, params) {
    await server.command(method, params);
    this.changed();
  }

  /** Something was done here: the rest of the page learns it by itself. */
  done = () => this.item && this.load();

  take() {
    const stamp = new Date().toISOString().slice(0, 19).replaceAll(":", "-");
    const volume = this.item.name;
    ask({
      title: `Take a snapshot of ${volume}`, text: "It costs nothing now. What is written later keeps what it replaces.",
      fields: [{ name: "snapshot", label: "Name", value: stamp }], verb: "Take it",
      act: ({ snapshot }) => this.run("snapshot.create", { volume, snapshot }), done: this.done,
    });
  }

  clone({ volume, name: snapshot }) {
    ask({
      title: `Clone ${volume}@${snapshot}`, text: "The clone is a volume of its own, and shares what neither changes.",
      fields: [{ name: "new", label: "Name of the new volume", value: `${volume}-clone` }], verb: "Make it",
      act: (fields) => this.run("volume.clone", { volume, snapshot, new: fields.new }), done: this.done,
    });
  }

  rollBack({ volume, name: snapshot, uuid, created_ns: taken }) {
    ask({
      title: `Roll ${volume} back to ${snapshot}?`,
      text: [`What was written to ${volume} since ${time(taken)} is lost, unless a snapshot has it.`, `Snapshot ${uuid}`],
      word: snapshot, verb: "Roll back", danger: true,
      act: () => this.run("snapshot.rollback", { volume, snapshot, uuid }), done: this.done,
    });
  }

  deleteSnapshot({ volume, name: snapshot, uuid }) {
    ask({
      title: `Delete the snapshot ${volume}@${snapshot}?`, text: `Snapshot ${uuid}`,
      look: async () => {
        const now = await server.command("snapshot.show", { volume, snapshot });
        if (now.uuid !== uuid) throw new Error(`another snapshot is called ${snapshot} now.`);
        this.usages.set(uuid, now.usage);
        return [`${bytes(now.usage.exclusive)} that nothing else shows are lost, and ${bytes(now.usage.reclaimable)} become free.`];
      },
      word: snapshot, verb: "Delete it", danger: true,
      act: () => this.run("snapshot.delete", { volume, snapshot, uuid }), done: this.done,
    });
  }

  deleteVolume() {
    const { name: volume, uuid } = this.item;
    ask({
      title: `Delete the volume ${volume}?`, text: `Volume ${uuid}`,
      look: async () => {
        const now = await server.command("volume.show", { volume });
        if (now.uuid !== uuid) throw new Error(`another volume is called ${volume} now.`);
        const clones = await server.command("volume.children", { volume });
        const names = clones.slice(0, NAMES).join(", ") + (clones.length > NAMES ? ` and ${clones.length - NAMES} more` : "");
        const kept = clones.length > 0 ? [`What is based on it keeps what it shows: ${names}.`] : [];
        const snapshots = now.snapshots > 0 ? ` So ${now.snapshots === 1 ? "is" : "are"} its ${counted(now.snapshots, "snapshot")}.` : "";
        return [`Its content is lost, ${bytes(now.usage.exclusive)} of which nothing else shows.${snapshots}`, ...kept];
      },
      word: volume, verb: "Delete it", danger: true,
      act: () => this.run("volume.delete", { volume, uuid }),
    });
  }
}
