// A menu below a button, and a field that renames.

import { icon, make } from "./dom.js";

let opened = null; // the menu that is shown

/** Show `items`, each an icon, words and what it does, at `anchor`. */
export function openMenu(anchor, items) {
  opened?.remove();
  const menu = make("div", { className: "menu", role: "menu" });
  menu.setAttribute("popover", "auto");
  opened = menu;
  for (const [name, words, act] of items) {
    const item = make("button", { type: "button", role: "menuitem" }, icon(name), words);
    item.addEventListener("click", () => {
      menu.hidePopover();
      act();
    });
    menu.append(item);
  }
  menu.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const all = [...menu.children];
    all.at((all.indexOf(document.activeElement) + step) % all.length).focus();
  });
  menu.addEventListener("toggle", ({ newState }) => {
    if (newState !== "closed") return;
    if (menu.contains(document.activeElement)) anchor.focus();
    menu.remove();
  });
  document.body.append(menu);
  menu.showPopover();
  const { bottom, right, top } = anchor.getBoundingClientRect();
  const isBelow = bottom + menu.offsetHeight + 8 < innerHeight;
  menu.style.top = `${isBelow ? bottom + 4 : top - menu.offsetHeight - 4}px`;
  menu.style.left = `${Math.max(8, Math.min(right - menu.offsetWidth, innerWidth - menu.offsetWidth - 8))}px`;
  menu.firstChild.focus();
}

/** Put a field in place of `node` until the text is entered, or given up. */
export function rename(node, text, done) {
  const field = make("input", { value: text, className: "rename", ariaLabel: "Name of the conversation" });
  let isOver = false;
  const end = (isKept) => {
    if (isOver) return;
    isOver = true;
    field.replaceWith(node);
    if (isKept && field.value.trim()) done(field.value.trim());
  };
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.isComposing) end(true);
    if (event.key === "Escape") { event.stopPropagation(); end(false); }
  });
  field.addEventListener("blur", () => end(true));
  node.replaceWith(field);
  field.focus();
  field.select();
}
