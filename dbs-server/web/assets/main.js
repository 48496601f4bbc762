// The frame of the page: asks what is new once a second, and has the views show it.

import * as server from "./ask.js";
import { clock, find, say } from "./dom.js";
import * as view from "./view.js";

const POLL_MS = 1000;
/** After the server did not answer. */
const RETRY_MS = 3000;
/** What was told longer ago is shown as old. */
const OLD_MS = 5000;

const state = { cursor: null, told: 0, when: new Date() };

let waits = 0;
let turn = 0;

async function poll() {
  clearTimeout(waits);
  turn += 1;
  const mine = turn;
  let rest = POLL_MS;
  try {
    const update = await server.live(state.cursor);
    if (mine !== turn) return;
    Object.assign(state, { told: performance.now(), when: new Date() });
    find("content").classList.remove("old");
    if (update.cursor !== state.cursor) {
      state.cursor = update.cursor;
      view.show(update);
    }
    find("trouble").hidden = true;
    find("content").hidden = false;
    find("login").hidden = true;
    await view.follow(shownTab(), update);
  } catch (error) {
    if (mine !== turn) return;
    if (error.status === 401) {
      login("The token is missing or wrong.");
      return;
    }
    trouble(error instanceof server.Refused ? error.message : `The page could not show what it was told: ${error.message}`);
    // What it was told then may be shown by half.
    if (!(error instanceof server.Refused)) state.cursor = null;
    rest = RETRY_MS;
  }
  if (!document.hidden) waits = setTimeout(poll, rest);
}

function trouble(text) {
  find("trouble").hidden = false;
  say(find("trouble"), state.told > 0 ? `${text} What is shown is of ${clock(state.when)}.` : text);
}

/** Shows it when nothing was told for some time. */
function age() {
  if (document.hidden || find("content").hidden || performance.now() - state.told < OLD_MS) return;
  find("content").classList.add("old");
  if (find("trouble").hidden) trouble("The server does not answer.");
}

function login(text) {
  find("content").hidden = true;
  find("login").hidden = false;
  if (text) trouble(text);
  find("token").focus();
}

const TABS = view.tabs;
const shownTab = () => TABS.find((name) => !find(`panel-${name}`).hidden);

function tab(name, focus = false) {
  for (const other of TABS) {
    const mine = other === name;
    find(`panel-${other}`).hidden = !mine;
    find(`tab-${other}`).setAttribute("aria-selected", String(mine));
    find(`tab-${other}`).tabIndex = mine ? 0 : -1;
    if (mine && focus) find(`tab-${other}`).focus();
  }
  view.opened(name);
  poll();
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  find("theme").setAttribute("aria-pressed", String(name === "dark"));
  localStorage.setItem("dbs-theme", name);
  view.tint();
}

function start() {
  view.start({ poll, open: tab });
  for (const name of TABS) find(`tab-${name}`).addEventListener("click", () => tab(name));
  find("tabs").addEventListener("keydown", (event) => {
    const at = TABS.indexOf(shownTab());
    const to = { ArrowRight: at + 1, ArrowLeft: at + TABS.length - 1, Home: 0, End: TABS.length - 1 }[event.key];
    if (to !== undefined) tab(TABS[to % TABS.length], true);
  });
  find("login").addEventListener("submit", (event) => {
    event.preventDefault();
    server.use(find("token").value);
    find("token").value = "";
    poll();
  });
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  theme(localStorage.getItem("dbs-theme") ?? (dark ? "dark" : "light"));
  find("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return;
    state.told = Math.max(state.told, performance.now() - OLD_MS / 2);
    poll();
  });
  setInterval(age, POLL_MS);
  const known = server.begin();
  tab(TABS[0]);
  if (!known) login("");
}

start();
