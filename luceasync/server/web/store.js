// Conversations in this browser's IndexedDB, settings in its localStorage, if it allows that.

import { merge, upgraded } from "./conversation.js";

const DATABASE = "luceasync";
const TABLE = "conversations";
const SETTINGS = "luceasync.settings";
const KEY = "luceasync.key";
const EARLIER = "luceasync.conversation."; // plus an id: where earlier versions kept each
const EARLIEST = "luceasync.conversations"; // where the first versions kept all, newest first

/** @typedef {import("./conversation.js").Conversation} Conversation */

export class Store {
  constructor() {
    this.local = allowed("localStorage");
    this.session = allowed("sessionStorage");
    this.database = null;
    /** @type {Conversation[]} newest first */
    this.conversations = [];
    this.tabs = null; // tells other tabs what has changed
  }

  /**
   * Read what is kept. `changed` is called with the id of what another tab has saved or removed. If
   * `isHeld(id)`, an answer is being written here: what the other tab has added joins it.
   */
  open(changed, isHeld) {
    this.opening = this.read(changed, isHeld);
    return this.opening;
  }

  async read(changed, isHeld) {
    try {
      this.database = await opened();
      await this.migrate();
      const kept = (await this.all()).map(upgraded).filter(Boolean);
      const isNew = (each) => !kept.some(({ id }) => id === each.id);
      this.conversations = sorted([...kept, ...this.conversations.filter(isNew)]);
      this.tabs = new BroadcastChannel(DATABASE);
      this.tabs.onmessage = async ({ data: id }) => {
        const kept = upgraded(await asked(this.table().get(id)));
        const others = this.conversations.filter((each) => each.id !== id);
        const before = this.conversations.find((each) => each.id === id);
        // The same object, so that a view of it stays one of what is kept.
        const now = kept && before ? joined(before, kept, isHeld(id)) : kept;
        this.conversations = now ? sorted([now, ...others]) : others;
        changed(id);
      };
    } catch {
      this.database = null; // kept in this tab alone; save() says so
    }
  }

  table(mode = "readonly") {
    return this.database.transaction(TABLE, mode).objectStore(TABLE);
  }

  all() {
    return asked(this.table().getAll());
  }

  /** Take over what an earlier version kept in localStorage, which is emptied then. */
  async migrate() {
    const names = Object.keys(this.local ?? {}).filter((name) => name.startsWith(EARLIER));
    const now = Date.now();
    const earliest = (read(this.local, EARLIEST) ?? []).map((each, age) => ({ savedAt: now - age, ...each }));
    const found = [...earliest, ...names.map((name) => read(this.local, name))].map(upgraded).filter(Boolean);
    for (const each of found) if (!(await asked(this.table().get(each.id)))) await asked(this.table("readwrite").put(each));
    for (const name of [...names, EARLIEST]) this.local?.removeItem(name);
  }

  /**
   * Keep the conversation, with what other tabs have added to it meanwhile.
   * @returns {Promise<string>} what the user should know if it could not be kept, else "".
   */
  async save(conversation) {
    conversation.savedAt = Date.now();
    const others = this.conversations.filter((each) => each.id !== conversation.id);
    this.conversations = [conversation, ...others];
    await this.opening;
    if (!this.database) return "This browser does not let the page store anything: conversations are lost when this tab closes.";
    try {
      const table = this.table("readwrite"); // one transaction: no other tab comes between
      const kept = upgraded(await asked(table.get(conversation.id)));
      if (kept) merge(conversation, kept);
      await asked(table.put(conversation));
      this.tabs.postMessage(conversation.id);
      return "";
    } catch {
      return "The browser's storage is full: this conversation is lost when the tab closes. Export it, or delete others.";
    }
  }

  async remove(conversation) {
    this.conversations = this.conversations.filter((each) => each.id !== conversation.id);
    if (!this.database) return;
    await asked(this.table("readwrite").delete(conversation.id));
    this.tabs.postMessage(conversation.id);
  }

  has(conversation) {
    return this.conversations.includes(conversation);
  }

  // --- settings ----------------------------------------------------------------------------------

  get settings() {
    return read(this.local, SETTINGS) ?? {};
  }

  set settings(settings) {
    write(this.local, SETTINGS, JSON.stringify(settings));
  }

  /** The API key, which is gone with the tab. */
  get key() {
    return this.session?.getItem(KEY) ?? this.ownKey ?? "";
  }

  set key(key) {
    this.ownKey = key;
    write(this.session, KEY, key);
  }
}

function joined(conversation, kept, isHeld) {
  if (!isHeld) return Object.assign(conversation, kept);
  merge(conversation, kept);
  return Object.assign(conversation, { title: kept.title, system: kept.system });
}

const sorted = (conversations) => conversations.sort((one, other) => other.savedAt - one.savedAt);

function opened() {
  const request = indexedDB.open(DATABASE, 1);
  request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
  return asked(request);
}

function asked(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
    request.onblocked = () => reject(new Error("The database is in use."));
  });
}

// One of the browser's storages; null if the page has no access.
function allowed(name) {
  try {
    return window[name];
  } catch {
    return null;
  }
}

function read(storage, name) {
  try {
    return JSON.parse(storage.getItem(name));
  } catch {
    return null;
  }
}

function write(storage, name, text) {
  try {
    storage?.setItem(name, text);
  } catch {
    // No room: the setting holds until the page is closed.
  }
}
