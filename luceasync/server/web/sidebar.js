// The list of conversations, by age; search.

import { matches } from "./conversation.js";
import { iconButton, make } from "./dom.js";
import { morph } from "./morph.js";

const DAY_MS = 86_400_000;

export class Sidebar {
  /** @param {HTMLElement} list
   * @param {HTMLInputElement} search
   * @param {{open: (id: string) => void, menu: (id: string, anchor: HTMLElement) => void, changed: () => void}} actions */
  constructor(list, search, actions) {
    this.list = list;
    this.search = search;
    search.addEventListener("input", actions.changed);
    list.addEventListener("click", ({ target }) => {
      const id = target.closest("[data-key]")?.dataset.key;
      if (target.closest(".open")) actions.open(id);
      else if (target.closest(".icon")) actions.menu(id, target.closest(".icon"));
    });
  }

  /** @param {import("./conversation.js").Conversation[]} conversations newest first
   * @param {Set<string>} running ids of those that are being answered */
  show(conversations, current, running) {
    const found = conversations.filter((each) => matches(each, this.search.value));
    const items = [];
    let group = "";
    for (const each of found) {
      const age = ageOf(each.savedAt);
      if (age !== group) items.push(make("li", { className: "group", textContent: age, data: { key: `group ${age}` } }));
      group = age;
      items.push(item(each, each === current, running.has(each.id)));
    }
    if (!found.length) {
      const words = conversations.length ? "Nothing found" : "No conversations yet";
      items.push(make("li", { className: "group", textContent: words }));
    }
    morph(this.list, make("ul", {}, ...items));
  }

  /** @returns {HTMLElement | undefined} the item of a conversation. */
  itemOf(id) {
    return [...this.list.children].find(({ dataset }) => dataset.key === id)?.querySelector(".open");
  }
}

function item(conversation, isCurrent, isRunning) {
  const title = conversation.title || "New conversation";
  const open = make("button", { type: "button", className: "open", textContent: title, title });
  if (isCurrent) open.setAttribute("aria-current", "true");
  const node = make("li", { className: isRunning ? "running" : "", data: { key: conversation.id } });
  node.append(open, iconButton("more", `More about ${title}`, null, { ariaHasPopup: "menu" }));
  return node;
}

function ageOf(savedAt) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (savedAt >= today) return "Today";
  if (savedAt >= today - DAY_MS) return "Yesterday";
  return savedAt >= today - 7 * DAY_MS ? "Last week" : "Earlier";
}
