// Conversations and settings, stored in this browser alone if it allows that.

const CONVERSATION = "luceasync.conversation."; // plus an id, so that tabs do not overwrite each other's
const TOGETHER = "luceasync.conversations"; // where earlier versions stored all of them, newest first
const SETTINGS = "luceasync.settings";
const KEY = "luceasync.key";
const DEFAULTS = { system: "", temperature: 0.7, maxTokens: "", thinking: true };

export class Store {
  constructor() {
    this.local = allowed("localStorage");
    this.session = allowed("sessionStorage");
    this.settings = { ...DEFAULTS, ...read(this.local, SETTINGS) };
    this.key = this.session?.getItem(KEY) ?? ""; // gone with the tab
    this.migrate(read(this.local, TOGETHER) ?? []);
    this.conversations = this.read();
  }

  // Conversations of an earlier version; the old entry stays until all of them are stored anew.
  migrate(conversations) {
    const now = Date.now();
    try {
      conversations.forEach((each, age) => {
        const name = CONVERSATION + each.id;
        if (!this.local.getItem(name)) this.local.setItem(name, JSON.stringify({ savedAt: now - age, ...each }));
      });
      if (conversations.length) this.local.removeItem(TOGETHER);
    } catch {
      // No room: tried again when the page is opened next.
    }
  }

  // Conversations without messages are dropped.
  begin() {
    const conversation = { id: crypto.randomUUID?.() ?? String(Date.now()), title: "", messages: [] };
    this.conversations = [conversation, ...this.conversations.filter((each) => each.messages.length)];
    return conversation;
  }

  remove(conversation) {
    this.conversations = this.conversations.filter((each) => each !== conversation);
    this.local?.removeItem(CONVERSATION + conversation.id);
  }

  // Read what other tabs have stored; `open` are the conversations that this tab works on.
  refresh(...open) {
    const found = this.read().filter(({ id }) => !open.some((each) => each.id === id));
    this.conversations = [...this.conversations.filter((each) => open.includes(each)), ...found];
  }

  // Returns a message for the user if the browser could not store it, else "".
  save(conversation) {
    try {
      this.local.setItem(SETTINGS, JSON.stringify(this.settings));
      this.session.setItem(KEY, this.key);
      if (conversation && this.conversations.includes(conversation)) { // it may have been removed
        conversation.savedAt = Date.now();
        this.local.setItem(CONVERSATION + conversation.id, JSON.stringify(conversation));
      }
      return "";
    } catch {
      return this.local
        ? "The browser's storage is full: new messages are lost when this tab closes. Delete some conversations."
        : "This browser does not let the page store anything: conversations are lost when this tab closes.";
    }
  }

  // Newest first.
  read() {
    return Object.keys(this.local ?? {})
      .filter((name) => name.startsWith(CONVERSATION))
      .map((name) => read(this.local, name))
      .filter((each) => each?.messages?.length)
      .sort((one, other) => other.savedAt - one.savedAt);
  }
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
