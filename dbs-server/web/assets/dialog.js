// Questions to the user. What takes something away says what, and is not done before that was confirmed.

import { el, find } from "./dom.js";

/**
 * Asks, and does something if the answer is yes. While it fails, the dialog stays with the reason.
 *
 * `fields` are `{ name, label, value, type }`; `word` must be written to confirm; `act` gets the fields.
 */
export function ask({ title, text, fields = [], word, verb, danger = false, act }) {
  const dialog = find("dialog");
  const came = document.activeElement;
  const trouble = el("p", { class: "trouble", role: "alert", hidden: true });
  const inputs = fields.map(({ name, value = "", type = "text" }) =>
    el("input", { id: `field-${name}`, name, value, type, required: true, autocomplete: "off", spellcheck: "false" }));
  const typed = word === undefined ? null : el("input", { id: "field-word", autocomplete: "off", spellcheck: "false", required: true });
  const yes = el("button", { type: "submit", class: danger ? "danger" : "main" }, verb);
  const ready = () => {
    yes.disabled = typed !== null && typed.value !== word;
  };
  typed?.addEventListener("input", ready);
  ready();
  const close = () => dialog.close();
  const submit = async (event) => {
    event.preventDefault();
    yes.disabled = true;
    try {
      await act(Object.fromEntries(inputs.map((input) => [input.name, input.value])));
      close();
    } catch (error) {
      trouble.textContent = error.message;
      trouble.hidden = false;
      ready();
    }
  };
  dialog.replaceChildren(
    el("form", { onsubmit: submit },
      el("h2", { id: "dialog-title" }, title),
      [text].flat().map((line) => el("p", {}, line)),
      inputs.map((input, at) => [el("label", { for: input.id }, fields[at].label), input]).flat(),
      typed === null ? null : [el("label", { for: "field-word" }, `Write ${word} to confirm`), typed],
      trouble,
      el("div", { class: "buttons" }, el("button", { type: "button", onclick: close }, "Cancel"), yes)));
  dialog.addEventListener("close", () => came?.isConnected && came.focus(), { once: true });
  dialog.showModal();
  (inputs[0] ?? typed ?? dialog.querySelector("button")).focus();
}
