// Conversations and settings, kept in this browser alone, where it lets the page keep anything.

const CONVERSATION = "luceasync.conversation."; // and its id: tabs do not write over each other's
const TOGETHER = "luceasync.conversations"; // where an earlier page kept all of them, the newest first
const SETTINGS = "luceasync.settings";
const KEY = "luceasync.key";
const DEFAULTS = { system: "", temperature: 0.7, maxTokens: "", thinking: true };

export class Store {
  constructor() {
    this.kept = allowed("localStorage");
    this.ofTab = allowed("sessionStorage");
    this.settings = { ...DEFAULTS, ...read(this.kept, SETTINGS) };
    this.key = this.ofTab?.getItem(KEY) ?? ""; // gone with the tab
    this.takeUp(read(this.kept, TOGETHER) ?? []);
    this.conversations = this.read();
  }

  // What an earlier page has kept; it stays where it was until all of it has a place of its own.
  takeUp(conversations) {
    const now = Date.now();
    try {
      conversations.forEach((each, age) => {
        const name = CONVERSATION + each.id;
        if (!this.kept.getItem(name)) this.kept.setItem(name, JSON.stringify({ savedAt: now - age, ...each }));
      });
      if (conversations.length) this.kept.removeItem(TOGETHER);
    } catch {
      // No room: they are tried again when the page is opened next.
    }
  }

  // A conversation without messages is not kept.
  begin() {
    const conversation = { id: crypto.randomUUID?.() ?? String(Date.now()), title: "", messages: [] };
    this.conversations = [conversation, ...this.conversations.filter((each) => each.messages.length)];
    return conversation;
  }

  remove(conversation) {
    this.conversations = this.conversations.filter((each) => each !== conversation);
    this.kept?.removeItem(CONVERSATION + conversation.id);
  }

  // Another tab has changed some; `open` are those that this one works on.
  refresh(...open) {
    const found = this.read().filter(({ id }) => !open.some((each) => each.id === id));
    this.conversations = [...this.conversations.filter((each) => open.includes(each)), ...found];
  }

  // What the browser has no room for any more is told: nothing is dropped in silence.
  save(conversation) {
    try {
      this.kept.setItem(SETTINGS, JSON.stringify(this.settings));
      this.ofTab.setItem(KEY, this.key);
      if (conversation && this.conversations.includes(conversation)) { // it may have been removed
        conversation.savedAt = Date.now();
        this.kept.setItem(CONVERSATION + conversation.id, JSON.stringify(conversation));
      }
      return "";
    } catch {
      return this.kept
        ? "This browser has no room for more conversations: what is new is lost with this tab. Delete some."
        : "This browser lets the page keep nothing: conversations are lost with this tab.";
    }
  }

  // The newest first.
  read() {
    return Object.keys(this.kept ?? {})
      .filter((name) => name.startsWith(CONVERSATION))
      .map((name) => read(this.kept, name))
      .filter((each) => each?.messages?.length)
      .sort((one, other) => other.savedAt - one.savedAt);
  }
}

// One of the browser's stores; null where it refuses the page even a look.
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
