// What the page shows of a store.

import * as server from "./ask.js";
import * as dialog from "./dialog.js";
import { bytes, counted, el, facts, few, find, number, rate, say, span, table, time } from "./dom.js";
import { Graph, spans } from "./graph.js";
import { List } from "./list.js";
import { SpaceMap } from "./map.js";
import { VolumeView } from "./volume.js";

const STILL = { read: 0, write: 0, reads: 0, writes: 0 };

/** See `start`. */
let frame;
const state = { clock: 0, server: "", volumes: new Map(), busy: new Set(), clients: new Map(), admin: false, changes: "" };

const total = new Graph("Throughput", [["read", "read"], ["written", "write"]], rate, 1024);
const requests = new Graph("Requests", [["reads", "read"], ["writes", "write"]], (count) => `${few(count)}/s`, 10);

const list = new List("Volumes", [
  { key: "name", title: "Name", kind: "name", text: (v) => v.name, by: (v) => v.name },
  { key: "size", title: "Size", kind: "num", text: (v) => bytes(v.size), by: (v) => v.size },
  { key: "snapshots", title: "Snapshots", kind: "num", text: (v) => (v.snapshots ? number(v.snapshots) : "–"), by: (v) => v.snapshots },
  { key: "read", title: "Read", kind: "num", text: (v) => rate(v.now.read), by: (v) => v.now.read, moves: true },
  { key: "write", title: "Written", kind: "num", text: (v) => rate(v.now.write), by: (v) => v.now.write, moves: true },
  { key: "requests", title: "Requests/s", kind: "num", text: (v) => few(v.now.reads + v.now.writes), by: (v) => v.now.reads + v.now.writes, moves: true },
  { key: "state", title: "State", kind: "state", text: (v) => (v.rebuilding ? "filling" : v.encryption?.locked ? "locked" : v.open ? "in use" : "idle"), by: (v) => (v.rebuilding ? 3 : v.encryption?.locked ? 2 : v.open ? 1 : 0) },
], (item) => view.open(item, state.admin));

const view = new VolumeView(find("volume"), (name) => {
  const item = [...state.volumes.values()].find((volume) => volume.name === name);
  if (!item) return;
  find("filter").value = "";
  filter();
  list.choose(item);
  list.go(list.at);
}, () => frame.poll());

const map = new SpaceMap(find("space"));

function filter() {
  const part = find("filter").value.trim().toLowerCase();
  const all = [...state.volumes.values()];
  const shown = part === "" ? all : all.filter((volume) => volume.name.toLowerCase().includes(part));
  list.set(shown);
  say(find("shown"), part === "" ? counted(all.length, "volume") : `${number(shown.length)} of ${counted(all.length, "volume")}`);
}

/** Rates of a volume between two of its counts. */
function rates(before, after, seconds) {
  const of = (key) => Math.max(0, after[key] - before[key]) / seconds;
  return { read: of("read_bytes"), write: of("written_bytes"), reads: of("reads"), writes: of("writes") };
}

/** Takes an update in; whether there are other volumes, or other names, now. */
function take(update) {
  const seconds = (update.clock_ns - state.clock) / 1e9;
  const again = `${update.started_ns}-${update.pid}` === state.server;
  const counts = again && seconds > 0 && !update.all;
  let other = update.all || update.removed.length > 0;
  if (update.all) {
    const there = new Set(update.volumes.map((volume) => volume.uuid));
    for (const uuid of state.volumes.keys()) if (!there.has(uuid)) state.volumes.delete(uuid);
  }
  for (const uuid of update.removed) state.volumes.delete(uuid);
  if (counts) {
    for (const item of state.busy) item.now = STILL;
    state.busy.clear();
  }
  for (const volume of update.volumes) {
    const item = state.volumes.get(volume.uuid);
    if (!item) {
      state.volumes.set(volume.uuid, { ...volume, now: STILL });
      other = true;
      continue;
    }
    other ||= item.name !== volume.name || item.size !== volume.size || item.snapshots !== volume.snapshots;
    const now = counts ? rates(item, volume, seconds) : STILL;
    Object.assign(item, volume, { now });
    if (now.read + now.write + now.reads + now.writes > 0) state.busy.add(item);
  }
  state.clock = update.clock_ns;
  state.server = `${update.started_ns}-${update.pid}`;
  return { other, counts };
}

/** Says which store this is, and where: other tabs may show others. */
function showPlace({ host, path, store }) {
  const place = `${host} ${path}`;
  say(find("title"), `DBS ${place}`);
  find("title").title = `Store ${store.uuid}`;
  document.title = `${place} – DBS`;
  dialog.at(`${host}, ${path}`);
}

function showStore(store) {
  const pairs = [
    ["In use", bytes(store.allocated)], ["Free", bytes(store.free)], ["Size", bytes(store.size)],
    ["Driver", store.driver], ["Commits", number(store.sequence)],
  ];
  const texts = JSON.stringify(pairs);
  if (find("facts").dataset.texts !== texts) {
    find("facts").dataset.texts = texts;
    find("facts").replaceChildren(...facts(pairs));
  }
  const room = Math.max(1, store.extents_total * store.extent_size);
  const pending = store.extents_pending * store.extent_size;
  const bar = find("capacity");
  bar.querySelector(".used").style.width = `${(store.allocated / room) * 100}%`;
  bar.querySelector(".pending").style.width = `${(pending / room) * 100}%`;
  bar.setAttribute("aria-label", `${Math.round((store.allocated / room) * 100)} % of the space is in use`);
  bar.classList.toggle("full", store.free / room < 0.05);
  const mode = find("mode");
  mode.hidden = !(store.read_only || state.admin);
  say(mode, store.read_only ? "store is read-only" : "admin");
}

function showActivity(update) {
  const jobs = update.jobs.map((job) => {
    const size = (count) => (job.unit === "bytes" ? bytes(count) : `${number(count)} steps`);
    const done = job.what !== "merge" && job.total > 0;
    const elapsed = job.elapsed_ns / 1e9;
    const moved = job.done - job.earlier;
    const left = done && moved > 0 && elapsed > 0 ? span(((job.total - job.done) * elapsed) / moved) : "–";
    const bar = done ? el("progress", { max: job.total, value: Math.min(job.done, job.total), "aria-label": job.what }) : "";
    const text = done ? `${size(job.done)} of ${size(job.total)}` : `${size(job.total - job.done)} left`;
    return [job.what, job.volume ?? "", bar, text, left];
  });
  find("jobs").replaceChildren(jobs.length === 0 ? el("p", { class: "empty" }, "Nothing runs.")
    : table("Jobs", [["Job", "name"], ["Volume", "name"], ["Done", "meter"], ["Progress", "num"], ["Time left", "num"]], jobs));
  const seen = new Map();
  const rows = update.clients.slice(0, 200).map((client) => {
    const key = `${client.who} ${client.since_ns} ${client.volume}`;
    const before = state.clients.get(key);
    const requests = client.requests;
    let [iops, read, written] = ["–", "–", "–"];
    if (requests) {
      const at = update.clock_ns;
      if (before && at > before.at) {
        const seconds = (at - before.at) / 1e9;
        const of = (...keys) => keys.reduce((all, name) => all + Math.max(0, requests[name] - before.requests[name]), 0) / seconds;
        [iops, read, written] = [few(of("reads", "writes", "others")), rate(of("read_bytes")), rate(of("written_bytes"))];
        seen.set(key, { at, requests });
      } else {
        seen.set(key, before ?? { at, requests });
      }
    }
    const what = client.volume ? (client.snapshot ? `${client.volume}@${client.snapshot}` : client.volume) : "–";
    return [client.who, what, client.read_only ? "read" : "read, write", time(client.since_ns), iops, read, written, client.load ? few(client.load.in_flight) : "–"];
  });
  state.clients = seen;
  const more = update.clients.length - rows.length;
  find("clients").replaceChildren(rows.length === 0 ? el("p", { class: "empty" }, "Nobody is connected.")
    : table(more > 0 ? `Clients, and ${number(more)} more` : "Clients",
      [["Client", "name"], ["Volume", "name"], ["May", "name"], ["Since", "time"], ["Requests/s", "num"], ["Read", "num"], ["Written", "num"], ["Under way", "num"]], rows));
  const count = update.jobs.length;
  say(find("tab-activity").querySelector("b"), count > 0 ? number(count) : "");
}

async function showFindings(warnings) {
  const found = await server.findings();
  const parts = [el("h2", {}, "Warnings of the store")];
  parts.push(warnings.length === 0 ? el("p", { class: "empty" }, "None.") : el("ul", { class: "warnings" }, warnings.map((text) => el("li", {}, text))));
  parts.push(el("h2", {}, "Last check"));
  if (found.check === null) parts.push(el("p", { class: "empty" }, "There was none since the server started: dbs check"));
  else {
    const { report, at_ns: at, left_out: left } = found.check;
    const looked = [counted(report.extents_checked, "extent"), counted(report.volumes_checked, "volume"), counted(report.snapshots_checked, "snapshot")];
    parts.push(el("p", {}, `${time(at)}: ${looked.join(", ")}`));
    const rows = report.findings.map((finding) => [finding.severity, finding.region, finding.index === null ? "" : number(finding.index), finding.message]);
    parts.push(rows.length === 0 ? el("p", { class: "good" }, "✓ All metadata is well.")
      : table(`Findings${left > 0 ? `, ${number(left)} more` : ""}`, [["Severity", "name"], ["Region", "name"], ["Index", "num"], ["Finding", "text"]], rows));
  }
  parts.push(el("h2", {}, "Last scrub"));
  if (found.scrub === null) parts.push(el("p", { class: "empty" }, "None has ended since the server started: dbs scrub"));
  else {
    const { report, at_ns: at } = found.scrub;
    parts.push(el("p", {}, `${time(at)}: ${bytes(report.checked)} read, ${bytes(report.learnt)} had no checksum before`));
    const name = (range) => `${range.volume ?? "(deleted)"}${range.snapshot === null ? "" : `@${range.snapshot}`}`;
    const rows = report.ranges.map((range) => [name(range), number(range.offset), bytes(range.length)]);
    parts.push(report.damaged === 0 ? el("p", { class: "good" }, "✓ All data is what was written.")
      : el("p", { class: "trouble" }, `✗ ${bytes(report.damaged)} are damaged.`));
    if (rows.length > 0) parts.push(table("Damaged", [["Volume or snapshot", "name"], ["Byte", "num"], ["Length", "num"]], rows));
  }
  const texts = JSON.stringify([warnings, found]);
  const bad = warnings.length + (found.check?.report.findings.length ?? 0) + (found.scrub?.report.ranges.length ?? 0);
  say(find("tab-findings").querySelector("b"), bad > 0 ? number(bad) : "");
  if (find("findings").dataset.texts === texts) return;
  find("findings").dataset.texts = texts;
  find("findings").replaceChildren(...parts);
}

/** Shows what is new. */
export function show(update) {
  const { other, counts } = take(update);
  const admin = update.admin && !update.store.read_only;
  state.admin = admin;
  if (other) filter();
  else list.changed();
  say(find("tab-volumes").querySelector("b"), number(state.volumes.size));
  showPlace(update);
  showStore(update.store);
  if (update.all) for (const graph of [total, requests]) graph.clear();
  for (const [at, read, written, reads, writes] of update.samples) {
    total.add(at / 1000, [read, written]);
    requests.add(at / 1000, [reads, writes]);
  }
  if (counts && view.item) view.add(update.clock_ns / 1e9, view.item.now);
  showActivity(update);
  if (view.item && !state.volumes.has(view.item.uuid)) {
    view.none();
    list.choose(null, false);
  } else if (view.item) {
    const { uuid, name, snapshots, size, depth, rebuilding } = view.item;
    const is = JSON.stringify([uuid, name, snapshots, size, depth, rebuilding, admin]);
    if (state.changes !== "" && state.changes !== is && state.changes.includes(uuid)) view.open(view.item, admin);
    else view.follow(update.store.sequence);
    state.changes = is;
  }
}

/** Draws what is drawn, and asks for what only the tab that is shown needs. */
export async function follow(tab, update) {
  draw();
  if (tab === "space") map.refresh(performance.now());
  if (tab === "findings" || find("findings").childElementCount === 0) await showFindings(update.store.warnings);
}

/** Draws anew, as in other colours. */
export function draw() {
  for (const graph of [total, requests]) graph.draw();
  view.draw();
}

/** Other colours. */
export function tint() {
  map.draw();
  draw();
}

/** A tab was opened. */
export function opened(tab) {
  if (tab === "space") map.refresh(Infinity);
  if (tab === "volumes") list.draw();
}

export const tabs = ["volumes", "space", "activity", "findings"];

/** `poll()` asks what is new, `open(tab)` shows a tab. */
export function start(its) {
  frame = its;
  find("volumes").append(list.element);
  find("spans").append(spans(draw));
  find("graphs").append(total.element, requests.element);
  find("filter").addEventListener("input", filter);
  find("filter").addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown") list.element.focus();
  });
  document.addEventListener("keydown", (event) => {
    const writes = event.target.closest("input, dialog");
    if (event.key !== "/" || writes || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    frame.open("volumes");
    find("filter").focus();
  });
}
