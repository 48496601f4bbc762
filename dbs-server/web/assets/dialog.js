// Questions to the user. What takes something away says what, and is not done before that was confirmed.

import { el, find } from "./dom.js";

/** Where the store is, which every question says. */
let where = "";
export const at = (text) => {
  where = text;
};

/**
 * Asks, and does something if the answer is yes. While it fails, the dialog stays with the reason.
 *
 * `fields` are `{ name, label, value, type }`; `word` must be written to confirm; `look` gets lines that say what is
 * lost as it is now, before which nothing can be confirmed; `act` gets the fields, and `done` is called after it.
 */
export function ask({ title, text, fields = [], word, verb, danger = false, look, act, done }) {
  const dialog = find("dialog");
  const came = document.activeElement;
  const trouble = el("p", { class: "trouble", role: "alert", hidden: true });
  const inputs = fields.map(({ name, value = "", type = "text" }) =>
    el("input", { id: `field-${name}`, name, value, type, required: true, autocomplete: "off", spellcheck: "false" }));
  const typed = word === undefined ? null : el("input", { id: "field-word", autocomplete: "off", spellcheck: "false", required: true });
  const yes = el("button", { type: "submit", class: danger ? "danger" : "main" }, verb);
  const lost = el("div", { class: "lost", role: "status", hidden: look === undefined }, el("p", { class: "quiet" }, "Looking at what would be lost …"));
  let looks = look !== undefined;
  let running = false;
  const ready = () => {
    yes.disabled = running || looks || (typed !== null && typed.value !== word);
  };
  typed?.addEventListener("input", ready);
  const no = el("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  const submit = async (event) => {
    event.preventDefault();
    if (yes.disabled) return;
    running = true;
    no.textContent = "Close, it goes on";
    ready();
    try {
      await act(Object.fromEntries(inputs.map((input) => [input.name, input.value])));
      // Unless it was left meanwhile, and another one is open.
      if (form.isConnected) dialog.close();
      done?.();
    } catch (error) {
      const unknown = error.kind === "silent" ? " Whether it was done is not known: look before you do it again." : "";
      trouble.textContent = `${error.message}${unknown}`;
      trouble.hidden = false;
    }
    running = false;
    no.textContent = "Cancel";
    ready();
  };
  const form = el("form", { onsubmit: submit },
    el("h2", { id: "dialog-title" }, title),
    [text].flat().map((line) => el("p", {}, line)),
    lost,
    where === "" ? null : el("p", { class: "quiet where" }, `On ${where}`),
    inputs.map((input, index) => [el("label", { for: input.id }, fields[index].label), input]).flat(),
    typed === null ? null : [el("label", { for: "field-word" }, `Write ${word} to confirm`), typed],
    trouble,
    el("div", { class: "buttons" }, no, yes));
  ready();
  dialog.replaceChildren(form);
  dialog.addEventListener("close", () => came?.isConnected && came.focus(), { once: true });
  dialog.showModal();
  (inputs[0] ?? typed ?? no).focus();
  const show = (lines) => lost.replaceChildren(...lines.map((line) => el("p", {}, line)));
  look?.().then((lines) => {
    show(lines);
    looks = false;
    ready();
  }, (error) => show([`What would be lost cannot be told: ${error.message}`]));
}
