// The page: input and display. Answers come from answer.js, stored conversations from store.js.

import { ask, get } from "./answer.js";
import { button, make } from "./dom.js";
import { Live } from "./live.js";
import { render } from "./markdown.js";
import { Store } from "./store.js";

const MAX_FILE_BYTES = 1 << 20;
const POLL_MS = 2000;
const at = (id) => document.getElementById(id);
const store = new Store();
const live = new Live(at("live"), () => store.key);
let current = store.begin();
let attached = []; // { name, text }
let asking = null; // the AbortController of the running answer
let answered = current; // its conversation

// --- display -----------------------------------------------------------------------------------

function show() {
  at("title").textContent = current.title || "New conversation";
  document.title = current.title ? `${current.title} · luceasync` : "luceasync";
  at("delete").hidden = !current.messages.length;
  at("messages").replaceChildren(...current.messages.map(shown));
  showConversations();
  toEnd(true);
}

function showConversations() {
  at("conversations").replaceChildren(...store.conversations.map((conversation) => {
    const open = button(conversation.title || "New conversation", () => { current = conversation; watchLive(false); closeMenu(); show(); });
    if (conversation === current) open.setAttribute("aria-current", "true");
    return make("li", {}, open);
  }));
}

function shown(message, place) {
  const item = make("li", { className: message.role });
  item.append(make("div", { className: "who", textContent: message.role === "user" ? "You" : "Model" }));
  item.append(...(message.role === "user" ? [saidByUser(message)] : saidByModel(message)));
  const told = make("div", { className: "told" }, ...figures(message));
  if (!asking) {
    if (message.role === "user") told.append(button("Edit", () => edit(item, place)));
    else told.append(button("Copy", () => copy(message.content)), button("Regenerate", () => regenerate(place)));
  }
  item.append(told);
  return item;
}

function saidByUser(message) {
  return make("div", { className: "said", textContent: message.content });
}

function saidByModel(message) {
  const parts = [];
  if (message.reasoning_content) {
    const thought = make("details", { className: "reasoning", open: Boolean(message.thinks) });
    thought.append(make("summary", { textContent: message.thinks ? "Thinking" : "Thought" }));
    thought.append(make("div", { textContent: message.reasoning_content }));
    parts.push(thought);
  }
  const said = make("div", { className: "said" });
  said.append(render(message.content));
  if (message.grows) said.classList.add("growing");
  parts.push(said);
  for (const call of message.tool_calls ?? []) {
    const node = make("div", { className: "call", textContent: `Calls ${call.function.name}` });
    node.append(make("pre", { textContent: call.function.arguments, tabIndex: 0 }));
    parts.push(node);
  }
  if (message.error) parts.push(make("p", { className: "wrong", textContent: message.error }));
  return parts;
}

// Time to the first token, tokens per second, cached tokens, tokens per round of speculation.
function figures(message) {
  const { usage, timings, luceasync, firstMs } = message.told ?? {};
  const told = [];
  if (firstMs !== undefined) told.push(`first token after ${Math.round(firstMs)} ms`);
  if (timings?.predicted_per_second) told.push(`${timings.predicted_per_second.toFixed(1)} tokens/s`);
  if (usage) told.push(`${usage.prompt_tokens} prompt tokens, ${usage.prompt_tokens_details?.cached_tokens ?? 0} cached`);
  if (usage) told.push(`${usage.completion_tokens} generated`);
  if (luceasync?.tier === "disk") told.push("from disk");
  if (luceasync?.speculation?.rounds) told.push(`tau ${luceasync.speculation.tau.toFixed(2)}`);
  if (message.stopped) told.push("stopped");
  if (message.cut) told.push("cut off at the maximum length");
  return told.map((text) => make("span", { textContent: text }));
}

function notice(text) {
  at("notice").textContent = text;
  at("notice").hidden = !text;
}

function toEnd(always) {
  const list = at("messages");
  const isNear = list.scrollHeight - list.scrollTop - list.clientHeight < 120;
  if (always || isNear) list.scrollTop = list.scrollHeight;
}

// --- actions -----------------------------------------------------------------------------------

async function answer() {
  asking = new AbortController();
  const message = { role: "assistant", content: "", grows: true };
  const conversation = answered = current;
  conversation.messages.push(message);
  busy(true);
  show();
  const begun = performance.now();
  const place = conversation.messages.length - 1;
  const draw = throttled(() => {
    if (conversation !== current) return;
    at("messages").children[place]?.replaceWith(shown(message, place));
    toEnd(false);
  });
  try {
    await ask(bodyOf(conversation), store.key, asking.signal, (said, chunk) => {
      Object.assign(message, said);
      message.thinks = Boolean(said.reasoning_content) && !said.content;
      message.told ??= {};
      if (message.told.firstMs === undefined && (said.content || said.reasoning_content || said.tool_calls)) {
        message.told.firstMs = performance.now() - begun;
      }
      if (chunk.usage) Object.assign(message.told, { usage: chunk.usage, timings: chunk.timings, luceasync: chunk.luceasync });
      if (chunk.choices[0]?.finish_reason === "length") message.cut = true;
      draw();
    });
  } catch (error) {
    if (error.name === "AbortError") message.stopped = true;
    else message.error = error.message;
    if (error.status === 401) askForKey();
  }
  message.grows = message.thinks = false;
  asking = null;
  busy(false);
  notice(store.save(conversation));
  show(); // even if another conversation is open: its buttons come back
  at("question").focus();
}

function bodyOf(conversation) {
  const { system, temperature, maxTokens, thinking } = store.settings;
  const said = conversation.messages.slice(0, -1).filter(hasSaid).map(({ role, content, reasoning_content, tool_calls }) => (
    { role, content, reasoning_content, tool_calls }
  ));
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...said],
    temperature: Number(temperature),
    ...(maxTokens ? { max_tokens: Number(maxTokens) } : {}),
    chat_template_kwargs: { enable_thinking: thinking },
  };
}

// False for an answer that failed before its first word.
function hasSaid({ role, content, tool_calls }) {
  return role === "user" || Boolean(content || tool_calls?.length);
}

function send(text) {
  const files = attached.map(({ name, text: content }) => `${name}:\n\`\`\`\n${content}\n\`\`\``);
  const content = [...files, text].filter(Boolean).join("\n\n");
  if (!content || asking) return;
  attached = [];
  showAttached();
  at("question").value = "";
  current.title ||= (text || content).slice(0, 60);
  current.messages.push({ role: "user", content });
  answer();
}

function regenerate(place) {
  current.messages.length = place;
  answer();
}

function edit(item, place) {
  const area = make("textarea", { value: current.messages[place].content, rows: 6 });
  area.setAttribute("aria-label", "Edit the question");
  const again = () => {
    current.messages.length = place;
    current.messages.push({ role: "user", content: area.value });
    answer();
  };
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") show();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) again();
  });
  item.replaceChildren(make("div", { className: "edit" }, area, button("Send", again), button("Cancel", show)));
  area.focus();
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    notice("");
  } catch {
    notice("The browser does not allow this page to write to the clipboard.");
  }
}

async function attach(files) {
  for (const file of files) {
    const bytes = file.size <= MAX_FILE_BYTES ? await file.arrayBuffer() : null;
    try {
      if (!bytes) throw new Error("is larger than 1 MiB");
      attached.push({ name: file.name, text: new TextDecoder("utf-8", { fatal: true }).decode(bytes) });
    } catch (error) {
      notice(`${file.name} was not attached: it ${bytes ? "is not UTF-8 text" : error.message}.`);
    }
  }
  showAttached();
}

function showAttached() {
  at("attached").replaceChildren(...attached.map((file) => {
    const remove = button(`${file.name} ×`, () => { attached = attached.filter((each) => each !== file); showAttached(); });
    remove.setAttribute("aria-label", `Remove ${file.name}`);
    return make("li", {}, remove);
  }));
}

function askForKey() {
  at("settings").open = true;
  at("side").classList.add("open");
  at("key").focus();
}

function busy(is) {
  at("send").hidden = is;
  at("stop").hidden = !is;
}

// The live view replaces the messages; the input stays.
function watchLive(is) {
  at("live").hidden = !is;
  at("messages").hidden = is;
  at("watch").setAttribute("aria-pressed", String(is));
  if (is) live.open();
  else live.close();
}

function begin() {
  watchLive(false);
  current = store.begin();
  closeMenu();
  show();
  at("question").focus();
}

// --- the server's status ------------------------------------------------------------------------

async function watch() {
  try {
    showServer(await get("status", store.key));
  } catch (error) {
    at("server").replaceChildren(make("dt", { textContent: "server" }), make("dd", { textContent: error.status ? error.message : "cannot be reached" }));
  }
  setTimeout(watch, document.hidden ? POLL_MS * 10 : POLL_MS);
}

function showServer(status) {
  const rows = [
    ["model", status.model],
    ["lanes", `${status.num_running} of ${status.num_lanes} running`],
    ["queue", status.num_queued],
    ["context", `${status.max_ctx_tokens} tokens`],
    ...Object.entries(status.cache?.num_bytes ?? {}).map(([tier, bytes]) => (
      [`cache, ${tier}`, `${(bytes / 2 ** 20).toFixed(1)} MiB, ${status.cache.num_nodes[tier] ?? 0} nodes`]
    )),
    ...(status.speculation?.rounds_total ? [["tokens per round", status.speculation.tau.toFixed(2)]] : []),
    ...(status.ready ? [] : [["not ready", status.detail]]),
  ];
  at("server").replaceChildren(...rows.flatMap(([name, value]) => (
    [make("dt", { textContent: name }), make("dd", { textContent: String(value) })]
  )));
}

// --- helpers ------------------------------------------------------------------------------------

// Draws at most once per frame.
function throttled(draw) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => { isDue = false; draw(); });
  };
}

function closeMenu() {
  at("side").classList.remove("open");
  at("menu").setAttribute("aria-expanded", "false");
}

function bind(id, field, read) {
  const node = at(id);
  if (node.type === "checkbox") node.checked = store.settings[field];
  else node.value = store.settings[field];
  const changed = () => { store.settings[field] = read(node); at("temperature-shown").value = store.settings.temperature; store.save(); };
  node.addEventListener("input", changed);
  changed();
}

bind("system", "system", (node) => node.value);
bind("temperature", "temperature", (node) => Number(node.value));
bind("max-tokens", "maxTokens", (node) => node.value);
bind("thinking", "thinking", (node) => node.checked);
at("key").value = store.key;
at("key").addEventListener("input", () => { store.key = at("key").value; store.save(); });
at("watch").addEventListener("click", () => watchLive(at("live").hidden));
at("new").addEventListener("click", begin);
at("stop").addEventListener("click", () => asking?.abort());
at("delete").addEventListener("click", () => { asking?.abort(); store.remove(current); begin(); });
at("file").addEventListener("change", () => { attach(at("file").files); at("file").value = ""; });
at("menu").addEventListener("click", () => {
  const isOpen = at("side").classList.toggle("open");
  at("menu").setAttribute("aria-expanded", String(isOpen));
});
at("ask").addEventListener("submit", (event) => { event.preventDefault(); send(at("question").value.trim()); });
at("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(at("question").value.trim()); }
});
document.addEventListener("keydown", (event) => {
  if (event.altKey && event.key === "l") { event.preventDefault(); watchLive(at("live").hidden); }
  if (event.altKey && event.key === "n") { event.preventDefault(); begin(); }
  if (event.key === "Escape") { asking?.abort(); closeMenu(); }
});

addEventListener("storage", () => { store.refresh(current, answered); showConversations(); });

show();
watch();
