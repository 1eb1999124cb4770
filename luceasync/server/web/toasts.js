// Short messages at the edge of the page, with an action at most.

import { button, iconButton, make } from "./dom.js";

const SHOWN_MS = 8000;

export class Toasts {
  constructor(place) {
    this.place = place;
  }

  /** Show `words`; `action`: what its button says, and does. A repeated text is shown once. */
  show(words, action = null) {
    for (const other of [...this.place.children]) if (other.firstChild.textContent === words) other.remove();
    const toast = make("div", { className: "toast" }, make("span", { textContent: words }));
    const close = () => toast.remove();
    if (action) toast.append(button(action[0], () => { close(); action[1](); }, { className: "main" }));
    toast.append(iconButton("close", "Close", close));
    this.place.append(toast);
    let timer = setTimeout(close, SHOWN_MS);
    // Whoever reads it, or is at its button, keeps it.
    const hold = () => clearTimeout(timer);
    const release = () => { timer = setTimeout(close, SHOWN_MS); };
    for (const type of ["pointerenter", "focusin"]) toast.addEventListener(type, hold);
    for (const type of ["pointerleave", "focusout"]) toast.addEventListener(type, release);
  }
}
