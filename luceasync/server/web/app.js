// The page: what the user does, and which part shows it.

import { Answers } from "./answers.js";
import { get } from "./api.js";
import { append, create, isBeingWritten, isSame, path, select, shortTitle, titleOf } from "./conversation.js";
import { icon, make } from "./dom.js";
import { showEmpty } from "./empty.js";
import { AttachedFiles, takeDropped, textOf } from "./files.js";
import { Live } from "./live.js";
import { openMenu, rename } from "./menu.js";
import { MessageList } from "./messages.js";
import { Panel } from "./panel.js";
import { Series } from "./series.js";
import { Settings, applyTheme } from "./settings.js";
import { Sidebar } from "./sidebar.js";
import { Store } from "./store.js";
import { Toasts } from "./toasts.js";
import { download, fromFile, toJson, toMarkdown } from "./transfer.js";
import { labelOf } from "./words.js";

const POLL_MS = 2000;
const HIDDEN_POLL_MS = 20_000;
const KEEP_EVERY_MS = 5000;
const MAX_IMPORT_BYTES = 2 ** 28; // what this page has exported may be large
const at = (id) => document.getElementById(id);

const store = new Store();
const settings = new Settings(store);
const toasts = new Toasts(at("toasts"));
const series = new Series();
const files = new AttachedFiles(at("attached"), (words) => toasts.show(words));
const drafts = new Map(); // by conversation id: { text, files }, typed and not sent
const state = { current: create(settings.values.system), status: null, needsKey: false, isRead: false };

const answers = new Answers({ grown, ended }, () => ({ fields: settings.request(state.status?.thinks), key: store.key }));
const sidebar = new Sidebar(at("conversations"), at("search"), { open: openId, menu: (id, anchor) => showMenu(byId(id), anchor), changed: showList });
const list = new MessageList(at("messages"), at("to-end"), {
  edited: (id, content) => branchFrom(id, content),
  regenerate: (id) => answerAgain(id),
  goOn: () => start((conversation) => answers.goOn(conversation)),
  select: (id) => { select(state.current, id); keep(state.current); show(); },
  copy,
  thinkingShown: (showsThinking) => settings.set({ showsThinking }),
});
const panel = new Panel(at("settings"), settings, {
  current: () => state.current,
  changed: () => { if (store.has(state.current)) keep(state.current); },
  exportAll: () => download("conversations.json", "application/json", toJson(store.conversations)),
  importFiles: () => pickFiles(importFiles),
});
const live = new Live(at("live"), { key: () => store.key, titleOf: titleOfLabel, series, took });

// --- what is shown -------------------------------------------------------------------------------

function show() {
  const { current } = state;
  const isEmpty = !path(current).length;
  showTitle();
  at("empty").hidden = !isEmpty;
  at("messages").hidden = isEmpty;
  showAddress();
  showBegin();
  list.showsThinking = settings.values.showsThinking;
  list.show(current, answers.of(current));
  showBusy();
  showList();
}

// A reload, a bookmark, back and forward lead to the conversation.
function showAddress() {
  if (!state.isRead) return;
  const hash = store.has(state.current) ? `#${state.current.id}` : "";
  if (location.hash !== hash) history.pushState(null, "", hash || location.pathname);
}

function showTitle() {
  const { current } = state;
  at("title").textContent = live.isOpen ? "What the server does" : current.title || "New conversation";
  document.title = current.title ? `${current.title} · luceasync` : "luceasync";
  at("more").hidden = live.isOpen || !path(current).length;
}

function showList() {
  sidebar.show(store.conversations, state.current, new Set(answers.running.keys()));
}

function showBusy() {
  const isBusy = Boolean(answers.of(state.current));
  at("send").hidden = isBusy;
  at("stop").hidden = !isBusy;
  checkSend();
}

function checkSend() {
  at("send").disabled = !at("question").value.trim() && !files.files.length;
}

function showStatus() {
  const { status } = state;
  const isWell = status?.ready;
  at("server").className = isWell ? "well" : "ill";
  at("server").textContent = status
    ? isWell ? `${status.num_running} of ${status.num_lanes} lanes busy${status.num_queued ? `, ${status.num_queued} waiting` : ""}` : status.detail
    : "The server cannot be reached";
  at("think").hidden = !status?.thinks;
  at("think").setAttribute("aria-pressed", String(settings.values.thinking));
  at("question").placeholder = status ? `Message ${status.model}` : "Message";
  showBegin();
}

/** Show what the model is, if nothing has been asked yet. */
function showBegin() {
  if (path(state.current).length) return;
  const enterKey = state.needsKey ? () => panel.open({ atKey: true }) : null;
  showEmpty(at("empty"), state.status, { ask: send, enterKey });
}

/** Show the live view, or the chat. */
function watchLive(isOn) {
  at("live").hidden = !isOn;
  at("chat").hidden = isOn;
  at("watch").setAttribute("aria-pressed", String(isOn));
  if (isOn) live.open();
  else {
    live.close();
    list.keepEnd();
  }
  showTitle();
}

// --- what happens --------------------------------------------------------------------------------

function grown(conversation, message) {
  keepNowAndThen(conversation);
  const isRunning = answers.of(conversation) === message; // else its end was shown before this frame
  if (isRunning && conversation === state.current && !at("chat").hidden) list.update(message, message);
}

function ended(conversation, message, error) {
  if (store.has(conversation)) keep(conversation); // it may have been deleted meanwhile
  if (error?.status === 401) panel.open({ atKey: true });
  if (conversation === state.current) show();
  else showList();
}

// What has come of a long answer, should the page be closed.
function keepNowAndThen(conversation) {
  if (Date.now() - conversation.savedAt > KEEP_EVERY_MS && store.has(conversation)) store.save(conversation);
}

/** Keep the conversation in the browser. */
async function keep(conversation) {
  const problem = await store.save(conversation);
  if (problem) toasts.show(problem);
  showList();
}

/** Answer in the current conversation with `how`, unless one is being written there. */
function start(how) {
  const { current } = state;
  if (answers.of(current)) return;
  watchLive(false);
  how(current);
  keep(current);
  list.isFollowing = true;
  show();
  focusQuestion();
}

function send(text) {
  const { current } = state;
  if (answers.of(current) || (!text.trim() && !files.files.length)) return;
  const question = { role: "user", content: text.trim(), ...(files.files.length ? { files: files.take() } : {}) };
  current.title ||= titleOf(question);
  append(current, current.head, question);
  if (text === at("question").value) at("question").value = ""; // else an example was clicked
  grow();
  start((conversation) => answers.begin(conversation));
}

function branchFrom(id, content) {
  const { current } = state;
  const { parent, files: attached } = current.messages[id];
  if (answers.of(current)) return;
  append(current, parent, { role: "user", content, ...(attached ? { files: attached } : {}) });
  start((conversation) => answers.begin(conversation));
}

function answerAgain(id) {
  const { current } = state;
  if (answers.of(current)) return;
  current.head = current.messages[id].parent;
  start((conversation) => answers.begin(conversation));
}

// --- conversations -------------------------------------------------------------------------------

const byId = (id) => store.conversations.find((each) => each.id === id);

function openId(id) {
  turnTo(byId(id));
}

function begin() {
  const { current } = state;
  const isNew = !store.has(current) && !path(current).length && current.system === settings.values.system;
  turnTo(isNew ? current : create(settings.values.system));
  focusQuestion();
}

/** Show another conversation; what is typed and not sent stays with its own. */
function turnTo(conversation) {
  drafts.set(state.current.id, { text: at("question").value, files: files.take() });
  state.current = conversation;
  const draft = drafts.get(conversation.id);
  at("question").value = draft?.text ?? "";
  files.put(draft?.files ?? []);
  grow();
  watchLive(false);
  closeSide();
  show();
}

/** Show the conversation that the address names. */
function openAddressed() {
  const found = byId(location.hash.slice(1));
  if (found) turnTo(found);
  else begin();
}

function showMenu(conversation, anchor) {
  const name = conversation.title || "conversation";
  openMenu(anchor, [
    ["edit", "Rename", () => renameAt(conversation, anchor)],
    ["settings", "System prompt", () => { if (conversation !== state.current) openId(conversation.id); panel.open({ atSystem: true }); }],
    ["export", "Export as Markdown", () => download(`${name}.md`, "text/markdown", toMarkdown(conversation))],
    ["export", "Export as JSON", () => download(`${name}.json`, "application/json", toJson([conversation]))],
    ["trash", "Delete", () => remove(conversation)],
  ]);
}

function renameAt(conversation, anchor) {
  const node = anchor === at("more") ? at("title") : sidebar.itemOf(conversation.id);
  rename(node, conversation.title, async (title) => {
    conversation.title = shortTitle(title);
    await keep(conversation);
    show();
  });
}

async function remove(conversation) {
  answers.stop(conversation);
  const wasKept = store.has(conversation);
  await store.remove(conversation);
  if (conversation === state.current) begin();
  else showList();
  if (!wasKept) return;
  toasts.show(`“${conversation.title || "Conversation"}” was deleted.`, ["Undo", async () => {
    await keep(conversation);
    openId(conversation.id);
  }]);
}

async function importFiles(chosen) {
  for (const file of chosen) {
    try {
      const found = fromFile(file.name, await textOf(file, MAX_IMPORT_BYTES));
      const isHere = (each) => store.conversations.some((other) => isSame(each, other));
      const added = found.filter((each) => !isHere(each));
      for (const each of added) await store.save(each);
      toasts.show(importWords(found, added));
      at("settings").close();
      if (added.length) openId(added[0].id);
    } catch (error) {
      toasts.show(error.message.startsWith(file.name) ? error.message : `${file.name} was not imported: it ${error.message}.`);
    }
  }
}

function importWords(found, added) {
  const here = found.length - added.length;
  if (!added.length) return here === 1 ? `“${found[0].title}” is here already.` : `All ${here} conversations are here already.`;
  const what = added.length === 1 ? `“${added[0].title}” was` : `${added.length} conversations were`;
  return `${what} imported.${here ? ` ${here} more ${here === 1 ? "is" : "are"} here already.` : ""}`;
}

function titleOfLabel(label) {
  return store.conversations.find(({ id }) => labelOf(id) === label)?.title ?? null;
}

// --- the server ----------------------------------------------------------------------------------

function took(status) {
  state.status = status;
  state.needsKey = false;
  series.add(status, performance.now());
  showStatus();
}

// An answer that another tab writes, until that tab is silent for too long.
function showWrittenElsewhere() {
  const last = path(state.current).at(-1);
  if (!last?.writtenAt || answers.of(state.current) || isBeingWritten(last)) return;
  last.writtenAt = 0;
  show();
}

async function poll() {
  showWrittenElsewhere();
  if (!live.isOpen) {
    try {
      took(await get("status", store.key));
    } catch (error) {
      state.status = null;
      state.needsKey = error.status === 401;
      showStatus();
      if (error.status) at("server").textContent = error.message;
    }
  }
  setTimeout(poll, document.hidden ? HIDDEN_POLL_MS : POLL_MS);
}

// --- input ---------------------------------------------------------------------------------------

async function copy(text) {
  try {
    if (navigator.clipboard) await navigator.clipboard.writeText(text);
    else copySelected(text);
    return true;
  } catch {
    toasts.show("The browser does not let this page write to the clipboard.");
    return false;
  }
}

// Pages without HTTPS, as in a local network, have no other clipboard.
function copySelected(text) {
  const area = document.body.appendChild(make("textarea", { value: text, className: "hidden" }));
  const focused = document.activeElement;
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  if (!isCopied) throw new Error("not copied");
}

function pickFiles(take) {
  const input = at("file");
  input.onchange = () => {
    take([...input.files]);
    input.value = "";
  };
  input.click();
}

// Not on phones, where a keyboard would cover the page.
function focusQuestion() {
  if (matchMedia("(hover: hover)").matches) at("question").focus();
}

// Fits the field to its text, where the browser's style sheet cannot.
function grow() {
  const area = at("question");
  if (!CSS.supports("field-sizing", "content")) {
    area.style.height = "auto";
    area.style.height = `${area.scrollHeight}px`;
  }
  checkSend();
}

async function attach(chosen) {
  await files.add(chosen);
  checkSend();
  at("question").focus();
}

function closeSide() {
  at("side").classList.remove("open");
  at("menu").setAttribute("aria-expanded", "false");
}

function bindButtons() {
  const buttons = {
    new: ["new", begin],
    "close-side": ["close", closeSide],
    menu: ["menu", () => at("menu").setAttribute("aria-expanded", String(at("side").classList.toggle("open")))],
    more: ["more", () => showMenu(state.current, at("more"))],
    attach: ["attach", () => pickFiles(attach)],
    stop: ["stop", () => answers.stop(state.current)],
    send: ["send", () => {}],
    watch: ["live", () => watchLive(at("live").hidden)],
    "open-settings": ["settings", () => { closeSide(); panel.open(); }],
    think: [null, () => { settings.set({ thinking: !settings.values.thinking }); showStatus(); }],
  };
  for (const [id, [name, act]] of Object.entries(buttons)) {
    if (name) at(id).append(icon(name));
    at(id).addEventListener("click", act);
  }
  at("watch").append("Live");
  at("open-settings").append("Settings");
}

function bindForm() {
  at("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    send(at("question").value);
  });
  at("question").addEventListener("input", grow);
  at("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send(at("question").value);
    }
    if (event.key === "ArrowUp" && !at("question").value && !answers.of(state.current)) {
      event.preventDefault();
      list.edit();
    }
  });
  takeDropped(at("main"), at("question"), attach);
}

function bindKeys() {
  const keys = { n: begin, l: () => watchLive(at("live").hidden), s: () => panel.open() };
  document.addEventListener("keydown", (event) => {
    const isTyping = event.target.closest("input, textarea, select, dialog");
    if (event.altKey && keys[event.key]) {
      event.preventDefault();
      keys[event.key]();
    } else if (event.key === "/" && !isTyping && !event.ctrlKey && !event.metaKey) {
      event.preventDefault();
      at("search").focus();
    } else if (event.key.length === 1 && event.key !== " " && !isTyping && !event.ctrlKey && !event.metaKey && !event.altKey && !at("chat").hidden) {
      at("question").focus(); // which the key then goes to
    } else if (event.key === "Escape" && !event.target.closest("dialog, [popover]")) {
      if (at("side").classList.contains("open")) closeSide();
      else if (!at("live").hidden) watchLive(false);
      else answers.stop(state.current);
    }
  });
}

async function main() {
  applyTheme(settings.values.theme);
  bindButtons();
  bindForm();
  bindKeys();
  show();
  focusQuestion();
  poll();
  await store.open((id) => {
    if (!byId(id)) answers.stop({ id }); // another tab has deleted it
    if (id === state.current.id && store.has(state.current)) show();
    else showList();
  }, (id) => answers.running.has(id));
  state.isRead = true;
  window.addEventListener("popstate", openAddressed);
  if (location.hash && !path(state.current).length) openAddressed();
  else show();
}

main();
