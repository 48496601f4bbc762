// Questions to the server. The token is kept for this tab, and sent in a header: no cookie, which programs on other
// ports of the machine would get as well.

const KEPT = "dbs-token";
let token = "";

/** Takes the token out of the address that is shown, or from this tab. */
export function begin() {
  const given = location.hash.slice(1);
  if (/^[\x21-\x7e]{16,256}$/.test(given)) {
    sessionStorage.setItem(KEPT, given);
    history.replaceState(null, "", "/");
  }
  token = sessionStorage.getItem(KEPT) ?? "";
  return token !== "";
}

export function use(text) {
  token = text.trim();
  sessionStorage.setItem(KEPT, token);
}

/** An error of the server: `kind` as in docs/json.md, `refused`, or `silent` if it did not answer. */
export class Refused extends Error {
  constructor(status, kind, message) {
    super(message);
    this.status = status;
    this.kind = kind;
  }
}

async function ask(path, options = {}) {
  let answer;
  try {
    const headers = { ...options.headers, Authorization: `Bearer ${token}` };
    answer = await fetch(path, { ...options, headers, signal: AbortSignal.timeout(60_000) });
  } catch {
    throw new Refused(0, "silent", "The server does not answer.");
  }
  const body = await answer.json().catch(() => null);
  // Cut off on the way, as by a server that was killed.
  if (answer.ok && body === null) throw new Refused(0, "silent", "The answer of the server was cut off.");
  if (answer.ok) return body;
  const { kind, message } = body?.error ?? { kind: "io", message: answer.statusText };
  throw new Refused(answer.status, kind, message);
}

/** What is new since an update that had this cursor. */
export const live = (cursor) => ask(cursor ? `/api/live?since=${encodeURIComponent(cursor)}` : "/api/live");

export const findings = () => ask("/api/findings");

/** Runs a command of the control socket. */
export const command = (method, params) =>
  ask("/api/command", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ method, params }),
  });
