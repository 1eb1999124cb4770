// A conversation as a tree of messages: an edited question or another answer is a branch. Pure.

/**
 * @typedef {{name: string, text: string}} AttachedFile
 * @typedef {object} Message
 * @property {string} id
 * @property {string | null} parent the message before it; null for the first
 * @property {"user" | "assistant"} role
 * @property {string} content without the attached files
 * @property {AttachedFile[]} [files]
 * @property {string} [reasoning_content]
 * @property {object[]} [tool_calls]
 * @property {object} [told] figures of the answer: usage, timings, luceasync, firstMs
 * @property {boolean} [stopped] the user ended it, or its page was closed
 * @property {number} [writtenAt] when a page was last seen writing it; 0 once it has ended
 * @property {boolean} [cut] it reached the maximum length
 * @property {string} [error]
 *
 * @typedef {object} Conversation
 * @property {string} id
 * @property {string} title
 * @property {string} system
 * @property {Record<string, Message>} messages in the order in which they came
 * @property {string | null} head the last message of the branch that is shown
 * @property {number} savedAt
 */

const TITLE_CHARS = 60;
const MAX_TITLE_CHARS = 200;
export const WRITING_MS = 5000; // a page that writes an answer says so this often
const MAX_SILENT_MS = 3 * WRITING_MS;

/** @returns {string} an id, also on pages without HTTPS, where randomUUID is missing. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** @returns {Conversation} */
export function create(system = "") {
  return { id: newId(), title: "", system, messages: {}, head: null, savedAt: Date.now() };
}

/**
 * Take over the messages that another tab has added to the same conversation. None is ever removed;
 * of one that both have, the longer version is the later one, and of equals the one that has ended.
 */
export function merge(conversation, other) {
  for (const [id, theirs] of Object.entries(other.messages)) {
    const ours = conversation.messages[id];
    if (!ours) conversation.messages[id] = theirs;
    else if (isLater(theirs, ours)) Object.assign(ours, theirs); // the object that an answer grows in
  }
}

function isLater(one, other) {
  const more = one.content.length - other.content.length;
  return more > 0 || (more === 0 && Boolean(other.stopped) && !one.stopped);
}

/** @returns {boolean} whether both have the same messages and system prompt, whatever their ids. */
export function isSame(one, other) {
  const said = ({ system, messages }) => {
    const ids = Object.keys(messages);
    const rows = Object.values(messages).map((each) => [each.role, each.content, each.files ?? [], ids.indexOf(each.parent)]);
    return JSON.stringify([system, rows]);
  };
  return said(one) === said(other);
}

/** @returns {string} a title that has room. */
export function shortTitle(title) {
  return title.length > MAX_TITLE_CHARS ? `${title.slice(0, MAX_TITLE_CHARS - 1)}…` : title;
}

/** @returns {Message[]} the branch that is shown, first message first. */
export function path(conversation) {
  const found = [];
  for (let at = conversation.messages[conversation.head]; at; at = conversation.messages[at.parent]) found.push(at);
  return found.reverse();
}

/** @returns {Message[]} what answers, or follows, the message `parent`; the oldest first. */
export function children(conversation, parent) {
  return Object.values(conversation.messages).filter((message) => message.parent === parent);
}

/** Add a message after `parent` and show its branch. */
export function append(conversation, parent, message) {
  const added = { id: newId(), parent, ...message };
  conversation.messages[added.id] = added;
  conversation.head = added.id;
  return added;
}

/** Show the branch of the message `id`: the newest one that goes through it. */
export function select(conversation, id) {
  let head = id;
  for (let next = children(conversation, head); next.length; next = children(conversation, head)) head = next.at(-1).id;
  conversation.head = head;
}

/** @returns {string} a file between fences longer than any within it. */
export function fenced({ name, text }) {
  const longest = Math.max(0, ...(text.match(/`+/g) ?? []).map((run) => run.length));
  const fence = "`".repeat(Math.max(3, longest + 1));
  return `${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
}

/** @returns {string} the message with its files, as the model gets it. */
export function wholeText({ content, files = [] }) {
  return [...files.map(fenced), content].filter(Boolean).join("\n\n");
}

/** @returns {object[]} the messages of a request, without answers that failed before a word. */
export function requestMessages(conversation, messages = path(conversation)) {
  const said = messages
    .filter(({ role, content, tool_calls }) => role === "user" || content || tool_calls?.length)
    .map((message) => ({
      role: message.role,
      content: message.role === "user" ? wholeText(message) : message.content,
      ...(message.reasoning_content ? { reasoning_content: message.reasoning_content } : {}),
      ...(message.tool_calls ? { tool_calls: message.tool_calls } : {}),
    }));
  return conversation.system ? [{ role: "system", content: conversation.system }, ...said] : said;
}

/** @returns {boolean} whether a page, this or another, is writing the answer. */
export function isBeingWritten({ writtenAt = 0 }, now = Date.now()) {
  return now - writtenAt < MAX_SILENT_MS;
}

/** @returns {boolean} whether the answer can be continued: it has text, and ended before its end. */
export function canContinue(message) {
  const isBroken = (message.stopped && !isBeingWritten(message)) || message.cut || message.error;
  return Boolean(message.role === "assistant" && message.content && !message.tool_calls && isBroken);
}

/** @returns {string} a title from the first question. */
export function titleOf({ content, files = [] }) {
  const line = (content || files.map(({ name }) => name).join(", ")).trim().replace(/\s+/g, " ");
  return line.length > TITLE_CHARS ? `${line.slice(0, TITLE_CHARS - 1)}…` : line;
}

/** @returns {boolean} whether the title or a message has all words of `query`. */
export function matches(conversation, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length) return true;
  const said = Object.values(conversation.messages).map(({ content }) => content);
  const text = [conversation.title, ...said].join("\n").toLowerCase();
  return words.every((word) => text.includes(word));
}

/**
 * A conversation of whatever version: earlier pages kept a list of messages.
 * @returns {Conversation | null} null if it is none.
 */
export function upgraded(kept) {
  if (!kept || typeof kept.id !== "string" || typeof kept.messages !== "object" || !kept.messages) return null;
  const made = { ...create(), ...kept, title: text(kept.title), system: text(kept.system) };
  made.title = shortTitle(made.title);
  if (Array.isArray(kept.messages)) {
    made.messages = {};
    made.head = null;
    for (const { role, content, ...rest } of kept.messages) {
      if (role !== "user" && role !== "assistant") continue;
      append(made, made.head, { ...rest, role, content: String(content ?? "") });
    }
  }
  const isWhole = Object.entries(made.messages).every(([id, one]) => (
    one?.id === id && ["user", "assistant"].includes(one.role) && typeof one.content === "string"
      && (one.parent === null || one.parent in made.messages)
  ));
  const isEmpty = !Object.keys(made.messages).length;
  if (isWhole) for (const message of Object.values(made.messages)) if (!areFigures(message.told)) delete message.told;
  return isWhole && !isEmpty && made.head in made.messages && !hasCircle(made.messages) ? made : null;
}

const text = (value) => (typeof value === "string" ? value : "");

const FIGURES = {
  usage: ["prompt_tokens", "completion_tokens"],
  timings: ["queued_ms", "prompt_ms", "predicted_ms", "prompt_n", "predicted_n"],
  luceasync: ["restore_ms"],
};

// Whether the parts of an answer's figures that are there have the numbers that are shown.
function areFigures(told) {
  if (told === undefined) return true;
  if (told === null || typeof told !== "object" || !isCount(told.firstMs ?? 0)) return false;
  const { speculation, kvflash } = told.luceasync ?? {};
  const drafted = !speculation?.rounds || [speculation.accepted, speculation.proposed, speculation.tau].every(isCount);
  const paged = !kvflash?.absent || [kvflash.absent, kvflash.recalled].every(isCount);
  const rates = [told.timings?.prompt_per_second, told.timings?.predicted_per_second, told.usage?.prompt_tokens_details?.cached_tokens];
  return drafted && paged && rates.every((each) => isCount(each ?? 0))
    && Object.entries(FIGURES).every(([part, names]) => !told[part] || names.every((name) => isCount(told[part][name])));
}

const isCount = (value) => Number.isFinite(value) && value >= 0;

function hasCircle(messages) {
  const seen = new Set(); // messages from which the first one is reached
  for (const id of Object.keys(messages)) {
    const walked = new Set();
    for (let at = id; at !== null && !seen.has(at); at = messages[at].parent) {
      if (walked.has(at)) return true;
      walked.add(at);
    }
    for (const each of walked) seen.add(each);
  }
  return false;
}
