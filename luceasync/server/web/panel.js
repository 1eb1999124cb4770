// The settings as a panel.

import { button, iconButton, make } from "./dom.js";
import { SAMPLING, applyTheme } from "./settings.js";

const SHORTCUTS = [
  ["Enter", "send"], ["Shift + Enter", "new line"], ["Esc", "stop the answer"], ["↑ in an empty field", "edit the last question"],
  ["Alt + N", "new conversation"], ["/", "search"], ["Alt + L", "what the server does"], ["Alt + S", "settings"],
];

/**
 * @typedef {object} PanelActions
 * @property {() => import("./conversation.js").Conversation} current
 * @property {() => void} changed the conversation's system prompt has changed
 * @property {() => void} exportAll
 * @property {() => void} importFiles
 */

export class Panel {
  /** @param {HTMLDialogElement} dialog
   * @param {import("./settings.js").Settings} settings
   * @param {PanelActions} actions */
  constructor(dialog, settings, actions) {
    this.dialog = dialog;
    this.settings = settings;
    this.actions = actions;
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
    dialog.addEventListener("close", () => { if (actions.current().system !== this.systemBefore) actions.changed(); });
  }

  /** Open it, at the field of the API key if that is wanted. */
  open({ atKey = false, atSystem = false } = {}) {
    if (!this.dialog.open) this.systemBefore = this.actions.current().system;
    const close = iconButton("close", "Close", () => this.dialog.close());
    this.dialog.replaceChildren(
      make("header", {}, make("h2", { textContent: "Settings" }), close),
      make("div", {}, this.systemPart(), this.samplingPart(), this.pagePart(), this.dataPart(), shortcutsPart()),
    );
    if (!this.dialog.open) this.dialog.showModal();
    if (atKey) this.dialog.querySelector("#key").focus();
    if (atSystem) this.dialog.querySelector("#system").focus();
  }

  systemPart() {
    const conversation = this.actions.current();
    const area = make("textarea", { id: "system", rows: 4, value: conversation.system, placeholder: "None" });
    const write = () => { conversation.system = area.value.trim(); };
    area.addEventListener("input", write);
    const presets = make("select", { id: "preset", ariaLabel: "Preset" });
    const fill = () => {
      const names = this.settings.values.presets.map(({ name }) => make("option", { value: name, textContent: name }));
      presets.replaceChildren(make("option", { value: "", textContent: "Presets …" }), ...names);
    };
    const remove = iconButton("trash", "Remove this preset", () => {
      this.settings.removePreset(presets.value);
      fill();
      remove.disabled = true;
    }, { disabled: true });
    presets.addEventListener("change", () => {
      const found = this.settings.values.presets.find(({ name }) => name === presets.value);
      remove.disabled = !found;
      if (!found) return;
      area.value = found.text;
      write();
    });
    const name = make("input", { id: "preset-name", placeholder: "Name of a new preset", ariaLabel: "Name of a new preset" });
    const save = button("Save as preset", () => {
      if (!name.value.trim() || !area.value.trim()) return;
      this.settings.savePreset(name.value.trim(), area.value.trim());
      fill();
      presets.value = name.value.trim();
      remove.disabled = false;
      name.value = "";
    });
    const always = make("input", { type: "checkbox", id: "always", checked: Boolean(area.value) && this.settings.values.system === area.value });
    always.addEventListener("change", () => this.settings.set({ system: always.checked ? area.value.trim() : "" }));
    area.addEventListener("input", () => { always.checked = false; });
    fill();
    return part(
      "System prompt of this conversation",
      area,
      make("div", { className: "row" }, presets, remove),
      make("div", { className: "row" }, name, save),
      make("label", { className: "row" }, always, "Begin new conversations with it"),
    );
  }

  samplingPart() {
    const fields = SAMPLING.map((field) => this.samplingField(field));
    const stop = make("textarea", { id: "stop-texts", rows: 2, value: this.settings.values.stop, placeholder: "None" });
    stop.addEventListener("input", () => this.settings.set({ stop: stop.value }));
    const label = make("label", { htmlFor: "stop-texts", textContent: "Stop at these texts, one a line" });
    const reset = button("Reset to the defaults", () => {
      this.settings.set({ sampling: {}, stop: "" });
      this.open();
    });
    return part("Sampling", make("div", { className: "fields" }, ...fields), label, stop, reset);
  }

  samplingField({ name, label, standard, min, max, step, help }) {
    const id = `set-${name}`;
    const input = make("input", { id, type: "number", min, step, placeholder: standard === null ? "none" : String(standard) });
    if (max !== undefined) input.max = max;
    input.value = this.settings.values.sampling[name] ?? "";
    input.setAttribute("aria-describedby", `${id}-help`);
    const told = make("small", { id: `${id}-help`, textContent: help });
    input.addEventListener("input", () => {
      const value = input.valueAsNumber;
      const isRight = Number.isFinite(value) && value >= min && (max === undefined || value <= max);
      input.setAttribute("aria-invalid", String(input.value !== "" && !isRight));
      told.textContent = input.value === "" || isRight ? help : `${min} to ${max ?? "any number"}`;
      if (input.value === "") this.settings.setSampling(name, null);
      else if (isRight) this.settings.setSampling(name, value);
    });
    return make("div", {}, make("label", { htmlFor: id, textContent: label }), input, told);
  }

  pagePart() {
    const themes = make("div", { className: "choice", role: "radiogroup", ariaLabel: "Theme" });
    for (const theme of ["system", "light", "dark"]) {
      const radio = make("input", { type: "radio", name: "theme", value: theme, checked: this.settings.values.theme === theme });
      radio.addEventListener("change", () => {
        this.settings.set({ theme });
        applyTheme(theme);
      });
      themes.append(make("label", {}, radio, theme));
    }
    const key = make("input", { id: "key", type: "password", autocomplete: "off", value: this.settings.store.key, placeholder: "None" });
    key.addEventListener("input", () => { this.settings.store.key = key.value; });
    const label = make("label", { htmlFor: "key", textContent: "API key, if the server needs one; gone with this tab" });
    return part("Page", themes, label, key);
  }

  dataPart() {
    const words = make("p", { textContent: "Conversations stay in this browser." });
    const buttons = make("div", { className: "row" }, button("Export all", this.actions.exportAll), button("Import", this.actions.importFiles));
    return part("Conversations", words, buttons);
  }
}

function shortcutsPart() {
  const pairs = SHORTCUTS.flatMap(([keys, does]) => [make("dt", {}, make("kbd", { textContent: keys })), make("dd", { textContent: does })]);
  return part("Keys", make("dl", {}, ...pairs));
}

function part(title, ...children) {
  return make("section", {}, make("h3", { textContent: title }), ...children);
}
