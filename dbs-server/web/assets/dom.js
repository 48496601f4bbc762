// Elements and texts. What comes from the store gets into the page as text alone.

/** An element with properties (`on*` are listeners, others are attributes) and children. */
export function el(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

/** Replaces the text of an element, if it is another one. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export const find = (id) => document.getElementById(id);

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/** Bytes with three digits: `1.50 GiB`. */
export function bytes(count) {
  let unit = 0;
  let left = Number(count);
  while (left >= 1023.5 && unit < UNITS.length - 1) {
    left /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || left >= 99.95 ? 0 : left >= 9.995 ? 1 : 2;
  return `${left.toFixed(digits)} ${UNITS[unit]}`;
}

/** A rate that is nothing most of the time. */
export const rate = (count) => (count >= 0.5 ? `${bytes(count)}/s` : "–");

/** A number with thin groups of digits. */
export const number = (count) => Math.round(count).toLocaleString("en").replaceAll(",", "\u202f");

export const few = (count) => (count >= 0.5 ? number(count) : "–");

/** `3 volumes`, `1 volume`. */
export const counted = (count, what) => `${number(count)} ${what}${count === 1 ? "" : "s"}`;

const two = (part) => String(part).padStart(2, "0");

/** A time of the store, nanoseconds since 1970, as the clock here has it. */
export function time(ns) {
  const date = new Date(ns / 1e6);
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return `${day} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
}

/** The same to the minute. */
export const minute = (ns) => time(ns).slice(0, 16);

/** The time of a day. */
export const clock = (date) => [date.getHours(), date.getMinutes(), date.getSeconds()].map(two).join(":");

/** Seconds as `1 h 05 min`. */
export function span(seconds) {
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${two(s % 60)} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${two(Math.floor((s % 3600) / 60))} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

/** Nanoseconds as a person says them. */
export function took(ns) {
  if (ns < 1) return "–";
  const [value, unit] = ns < 1e6 ? [ns / 1e3, "µs"] : ns < 1e9 ? [ns / 1e6, "ms"] : [ns / 1e9, "s"];
  return `${value.toFixed(value >= 99.5 ? 0 : value >= 9.95 ? 1 : 2)} ${unit}`;
}

/** Replaces what an element shows, if it is other than it was: `is` says what it is. Who uses a button in it, still does. */
export function replace(element, is, make) {
  const texts = JSON.stringify(is);
  if (element.dataset.texts === texts) return;
  element.dataset.texts = texts;
  const used = element.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  element.replaceChildren(...make());
  if (used !== null) [...element.querySelectorAll("[aria-label]")].find((one) => one.getAttribute("aria-label") === used)?.focus();
}

/** A table: columns are `[title, class]`, rows are arrays of texts and elements. */
export function table(caption, columns, rows) {
  const head = columns.map(([title, kind]) => el("th", { scope: "col", class: kind }, title));
  const cells = (row) => row.map((cell, at) => el("td", { class: columns[at][1] }, cell));
  return el("table", {},
    el("caption", {}, caption),
    el("thead", {}, el("tr", {}, head)),
    el("tbody", {}, rows.map((row) => el("tr", {}, cells(row)))));
}

/** Pairs of a term and what it is. */
export const facts = (pairs) =>
  pairs.filter(([, value]) => value !== null).map(([term, value]) => el("div", {}, el("dt", {}, term), el("dd", {}, value)));

/** A canvas as sharp as the screen; what it draws with, and its size. */
export function sharp(canvas, height) {
  const width = canvas.clientWidth || 600;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const draw = canvas.getContext("2d");
  draw.scale(ratio, ratio);
  return { draw, width, height };
}

/** A colour of the style sheet. */
export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
