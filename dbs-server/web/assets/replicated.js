// What the page shows of a volume over replicas.

import * as server from "./ask.js";
import * as dialog from "./dialog.js";
import { bytes, counted, el, facts, few, find, number, rate, replace, say, span, table, time, took } from "./dom.js";
import { Graph, spans } from "./graph.js";
import { tree } from "./volume.js";

/** What a replica said longer ago than so is said to be old. */
const OLD_MS = 5000;

/** See `start`. */
let frame;

const perSecond = (count) => `${few(count)}/s`;
const latency = (title, tint) => new Graph(title, [["half within", tint], ["99 of 100 within", "quiet"]], took, 10);
// In the order of a sample's figures.
const requests = new Graph("Requests", [["reads", "read"], ["writes", "write"]], perSecond, 10);
const throughput = new Graph("Throughput", [["read", "read"], ["written", "write"]], rate, 1024);
const reads = latency("Latency of reads", "read");
const writes = latency("Latency of writes", "write");
const queue = new Graph("Requests under way", [["requests", "accent"]], few, 10);
const graphs = [requests, throughput, reads, writes, queue];

function take({ all, samples }) {
  if (all) for (const graph of graphs) graph.clear();
  for (const [at, readsNow, writesNow, read, written, read50, read99, write50, write99, underWay] of samples) {
    requests.add(at / 1000, [readsNow, writesNow]);
    throughput.add(at / 1000, [read, written]);
    reads.add(at / 1000, [read50, read99]);
    writes.add(at / 1000, [write50, write99]);
    queue.add(at / 1000, [underWay]);
  }
}

/** Says which volume this is, and where: other tabs may show others. */
function showPlace({ host, path, volume, replicas, admin }) {
  say(find("title"), `Volume ${path} on ${host}`);
  document.title = `${path} on ${host} – DBS`;
  dialog.at(`${host}, volume ${path}`);
  find("capacity").hidden = true;
  const mode = find("mode");
  mode.hidden = !admin;
  say(mode, "admin");
  const whole = replicas.filter((replica) => replica.mode === "RW").length;
  const pairs = [
    ["Size", bytes(volume.size)],
    ["Frontend", volume.frontend === "" ? "none" : `${volume.frontend}, ${volume.frontend_state}`],
    ["Complete replicas", `${whole} of ${replicas.length}`],
  ];
  replace(find("facts"), pairs, () => facts(pairs));
}

function showVolume(volume) {
  const limit = volume.snapshot_max_size > 0 ? bytes(volume.snapshot_max_size) : "none";
  const failed = volume.expansion_error === "" ? null : `${volume.expansion_failed_at}: ${volume.expansion_error}`;
  const pairs = [
    ["Frontend", volume.frontend === "" ? "none" : volume.frontend],
    ["State", volume.frontend_state === "" ? "–" : volume.frontend_state],
    ["Where", volume.endpoint === "" ? "–" : volume.endpoint],
    ["Block device", volume.block_device === "" ? null : volume.block_device],
    ["Expansion", volume.expanding ? "goes on" : "none"],
    ["Last expansion failed", failed],
    ["Highest number of snapshots", number(volume.snapshot_max_count)],
    ["Highest size of snapshots", limit],
  ];
  replace(find("volume"), pairs, () => facts(pairs));
}

/** What goes on in a replica, or went wrong. */
function doing({ mode, why, error, rebuild, purge, mismatches, healed, age_ms: age }) {
  const lines = [];
  if (mode === "ERR") lines.push(el("span", { class: "trouble" }, why ?? "it missed a change"));
  if (error) lines.push(el("span", { class: "trouble" }, error));
  if (rebuild) {
    const parts = [`${rebuild.progress} %`];
    if (rebuild.bytes_per_second !== null) parts.push(rate(rebuild.bytes_per_second));
    if (rebuild.left_seconds !== null) parts.push(`${span(rebuild.left_seconds)} left`);
    if (rebuild.from !== null) parts.push(`from ${rebuild.from.join(", ")}`);
    if (rebuild.error !== "") parts.push(rebuild.error);
    lines.push(el("progress", { max: 100, value: rebuild.progress, "aria-label": "Rebuild" }), ` ${parts.join(", ")}`);
  } else if (mode === "WO") lines.push("is being rebuilt");
  if (purge) lines.push(el("progress", { max: 100, value: purge.progress, "aria-label": "Purge" }), ` purge ${purge.progress ?? 0} %`);
  if (mismatches > 0) lines.push(` ${counted(mismatches, "request")} met damaged data, ${counted(healed, "block")} healed`);
  if (age > OLD_MS) lines.push(` said ${span(age / 1000)} ago`);
  return lines.length === 0 ? "–" : el("span", {}, lines);
}

function showReplicas(replicas) {
  const columns = [["Address", "name"], ["Mode", "name"], ["Revision", "num"], ["Size", "num"], ["Allocated", "num"], ["Layers", "num"], ["Now", "text"]];
  const or = (value, text) => (value === null || value === undefined ? "–" : text(value));
  const rows = () => replicas.map((replica) => [
    replica.address,
    el("span", { class: `mode ${replica.mode}` }, replica.mode),
    or(replica.revision, number), or(replica.size, bytes), or(replica.allocated, bytes), or(replica.layers, number),
    doing(replica),
  ]);
  // An age that nobody is shown changes nothing.
  const key = replicas.map(({ age_ms: age, ...rest }) => [rest, age > OLD_MS ? Math.round(age / 1000) : 0]);
  replace(find("replicas"), key, () => (replicas.length === 0 ? [el("p", { class: "empty" }, "There is none.")] : [table("Replicas", columns, rows())]));
  const bad = replicas.filter((replica) => replica.mode !== "RW");
  const words = bad.map(({ mode, address }) => (mode === "WO" ? `${address} is being rebuilt` : `${address} is ERR`));
  const health = find("health");
  health.className = bad.length === 0 ? "good" : "trouble";
  say(health, replicas.length === 0 ? "" : bad.length === 0 ? "✓ All are complete." : `✗ ${words.join("; ")}`);
  say(find("tab-replicas").querySelector("b"), bad.length > 0 ? number(bad.length) : "");
}

const button = (text, label, act, more = {}) => el("button", { type: "button", "aria-label": label, onclick: act, ...more }, text);

async function run(method, params) {
  await server.command(method, params);
  frame.poll();
}

function takeOne(volume) {
  const stamp = new Date().toISOString().slice(0, 19).replaceAll(":", "-").toLowerCase();
  dialog.ask({
    title: `Take a snapshot of ${volume}`, text: "What is written later keeps what it replaces. File systems are synced before, not frozen.",
    fields: [{ name: "snapshot", label: "Name", value: stamp }], verb: "Take it",
    act: ({ snapshot }) => run("snapshot.create", { snapshot }),
  });
}

function revert(volume, { name, created }) {
  dialog.ask({
    title: `Revert ${volume} to ${name}?`,
    text: [`What was written since ${created} is lost, unless a snapshot has it.`],
    word: name, verb: "Revert", danger: true,
    act: () => run("snapshot.revert", { snapshot: name, created }),
  });
}

function remove({ name, created }) {
  dialog.ask({
    title: `Remove the snapshot ${name}?`,
    text: [`It was taken at ${created}. It is marked as removed on all replicas, and nothing can be reverted to it. A purge frees its space.`],
    word: name, verb: "Remove it", danger: true,
    act: () => run("snapshot.remove", { snapshot: name, created }),
  });
}

function purge(volume) {
  dialog.ask({
    title: `Purge ${volume}?`,
    text: "On all replicas, what is marked as removed goes into what is based on it. That moves data, while the volume is used.",
    verb: "Purge", danger: true, act: () => run("snapshot.purge", {}),
  });
}

function showSnapshots({ path, volume, snapshots, admin }) {
  const up = volume.frontend_state === "up";
  const acts = admin && snapshots !== null;
  replace(find("acts"), [acts], () => (!acts ? [] : [
    button("Snapshot", `Take a snapshot of ${path}`, () => takeOne(path)),
    button("Purge", `Purge ${path}`, () => purge(path), { class: "danger" })]));
  const taken = (snapshots ?? []).filter((disk) => disk.name !== "volume-head");
  say(find("tab-snapshots").querySelector("b"), taken.length > 0 ? number(taken.length) : "");
  replace(find("snapshots"), [snapshots, admin, up], () => {
    if (snapshots === null) return [el("p", { class: "empty" }, "No complete replica has said yet what there is.")];
    const layers = new Map(snapshots.map((disk) => [disk.name, disk]));
    const named = (name) => (name === "" ? null : `${path}@${name}`);
    const head = layers.get("volume-head");
    const rows = tree({ name: path, parent: named(head?.parent ?? "") },
      taken.map((disk) => ({ name: disk.name, parent: named(disk.parent), children: [] })));
    const columns = [["Name", "name"], ["Created", "time"], ["Size", "num"], ["Based on it", "name"]];
    if (admin) columns.push(["Change", "acts"]);
    const hint = admin && up
      ? [el("p", { class: "quiet" }, "The volume can be reverted while no frontend is up: longhorn frontend shutdown.")] : [];
    return [...hint, table(`Snapshots of ${path}`, columns, rows.map((row) => layer(row, layers, path, admin, up)))];
  });
}

/** A row of the tree. */
function layer({ level, kind, snapshot }, layers, volume, admin, up) {
  const disk = layers.get(kind === "head" ? "volume-head" : snapshot.name);
  const marks = [];
  if (disk?.removed) marks.push("removed");
  if (kind !== "head" && !disk.usercreated) marks.push("system");
  marks.push(...Object.entries(disk?.labels ?? {}).map(([key, value]) => `${key}=${value}`));
  const based = disk?.parent ? [el("span", { class: "unseen" }, `based on ${disk.parent}`)] : [];
  const name = el("span", { class: `node level-${Math.min(level, 6)} ${kind}` },
    el("i", { "aria-hidden": "true" }, kind === "head" ? "●" : "○"), kind === "head" ? "now" : disk.name,
    marks.map((text) => el("small", {}, text)), based);
  const children = Object.keys(disk?.children ?? {}).map((child) => (child === "volume-head" ? "now" : child));
  const created = disk && kind !== "head" && disk.created !== "" ? time(Date.parse(disk.created) * 1e6) : "";
  const row = [name, created, disk ? bytes(disk.size) : "–", children.join(", ")];
  if (!admin) return row;
  if (kind === "head") return [...row, ""];
  return [...row, el("div", { class: "buttons" },
    button("Revert", `Revert to ${disk.name}`, () => revert(volume, disk), { disabled: up || disk.removed }),
    button("Remove", `Remove snapshot ${disk.name}`, () => remove(disk), { class: "danger", disabled: disk.removed }))];
}

function showEvents(events) {
  const bad = events.filter((event) => event.error).length;
  say(find("tab-events").querySelector("b"), bad > 0 ? number(bad) : "");
  replace(find("events"), events, () => (events.length === 0 ? [el("p", { class: "empty" }, "Nothing has happened since the controller started.")]
    : [table("Events, the newest first", [["Time", "time"], ["Event", "name"], ["What", "text"]],
      events.map(({ at_ns: at, error, event, text }) => [time(at), el("span", error ? { class: "trouble" } : {}, `${error ? "✗ " : ""}${event}`), text]))]));
}

/** Shows what is new. */
export function show(update) {
  take(update);
  showPlace(update);
  showVolume(update.volume);
  showReplicas(update.replicas);
  showSnapshots(update);
  showEvents(update.events);
}

/** Draws what is drawn. */
export function follow() {
  draw();
}

export function draw() {
  for (const graph of graphs) graph.draw();
}

/** Other colours. */
export const tint = draw;

/** A tab was opened. */
export const opened = draw;

export const tabs = ["replicas", "snapshots", "activity", "events"];

/** `poll()` asks what is new. */
export function start(its) {
  frame = its;
  find("spans").append(spans(draw));
  find("graphs").append(...graphs.map((graph) => graph.element));
}
