// Conversations and settings, kept in this browser alone.

const CONVERSATIONS = "luceasync.conversations";
const SETTINGS = "luceasync.settings";
const KEY = "luceasync.key";
const DEFAULTS = { system: "", temperature: 0.7, maxTokens: "", thinking: true };

export class Store {
  constructor() {
    this.conversations = read(localStorage, CONVERSATIONS, []);
    this.settings = { ...DEFAULTS, ...read(localStorage, SETTINGS, {}) };
    this.key = sessionStorage.getItem(KEY) ?? ""; // gone with the tab
  }

  // A conversation without messages is not kept.
  begin() {
    const conversation = { id: crypto.randomUUID?.() ?? String(Date.now()), title: "", messages: [] };
    this.conversations = [conversation, ...this.conversations.filter((each) => each.messages.length)];
    return conversation;
  }

  remove(conversation) {
    this.conversations = this.conversations.filter((each) => each !== conversation);
    this.save();
  }

  // What the browser has no room for any more is told: nothing is dropped in silence.
  save() {
    localStorage.setItem(SETTINGS, JSON.stringify(this.settings));
    sessionStorage.setItem(KEY, this.key);
    try {
      localStorage.setItem(CONVERSATIONS, JSON.stringify(this.conversations.filter((each) => each.messages.length)));
      return "";
    } catch {
      return "This browser has no room for more conversations: what is new is lost with this tab. Delete some.";
    }
  }
}

function read(storage, name, otherwise) {
  try {
    return JSON.parse(storage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}
