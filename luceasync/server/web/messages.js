// The list of messages: one view for each, which outlives updates; and the reader's place.

import { canContinue, children, isBeingWritten, path } from "./conversation.js";
import { button, icon, iconButton, make } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { morph } from "./morph.js";
import { timeBar } from "./timebar.js";
import { explained, number, rate, duration } from "./words.js";

const NEAR_END_PX = 40; // the reader follows the answer from there
const DRAWN_AT_ONCE = 8; // messages at the end; the others when they come near, or in idle time
const NEAR_VIEW = "1500px 0px";
const IDLE_MS = 6; // that drawing one more message may take

/**
 * @typedef {object} Actions what the user does to a message, by its id
 * @property {(id: string, content: string) => void} edited
 * @property {(id: string) => void} regenerate
 * @property {(id: string) => void} goOn
 * @property {(id: string) => void} select
 * @property {(text: string) => Promise<boolean>} copy whether it was
 * @property {(shown: boolean) => void} thinkingShown
 */

export class MessageList {
  /** @param {HTMLElement} place scrolls
   * @param {HTMLElement} toEnd the button that leads to the newest text
   * @param {Actions} actions */
  constructor(place, toEnd, actions) {
    this.place = place;
    this.toEnd = toEnd;
    this.actions = actions;
    this.views = new Map(); // by message id
    this.conversation = null;
    this.isFollowing = true;
    this.showsThinking = false; // how new answers begin
    place.addEventListener("click", (event) => this.clicked(event));
    place.addEventListener("scroll", () => this.scrolled(), { passive: true });
    toEnd.addEventListener("click", () => this.follow());
    new ResizeObserver(() => this.keepEnd()).observe(place);
    this.due = new Map(); // views that are not drawn yet: what draws each, by message id
    this.nearing = new IntersectionObserver((entries) => {
      for (const { isIntersecting, target } of entries) if (isIntersecting) this.drawDue(target.dataset.id);
    }, { root: place, rootMargin: NEAR_VIEW });
    this.isIdling = false;
  }

  /** Show a conversation's branch. `running`: the answer that is being written, if any. */
  show(conversation, running) {
    const isOther = conversation !== this.conversation;
    this.conversation = conversation;
    if (isOther) {
      this.views.clear();
      this.due.clear();
      this.nearing.disconnect();
    }
    const messages = path(conversation);
    const views = messages.map((message) => {
      const known = this.views.get(message.id) ?? new MessageView(message, this.showsThinking);
      this.views.set(message.id, known);
      return known;
    });
    placeAll(this.place, views.map((view) => view.root));
    const siblings = Map.groupBy(Object.values(conversation.messages), ({ parent }) => parent);
    messages.forEach((message, i) => {
      const all = siblings.get(message.parent);
      const draw = () => this.views.get(message.id)?.update(message, { running, isLast: i === messages.length - 1, others: { all, at: all.indexOf(message) } });
      if (this.views.get(message.id).isDrawn || i >= messages.length - DRAWN_AT_ONCE) draw();
      else this.drawLater(message.id, draw);
    });
    for (const id of [...this.views.keys()]) if (!(id in conversation.messages)) this.views.delete(id);
    if (isOther) this.follow();
    else this.keepEnd();
  }

  /** Draw one message anew, if it is shown. */
  update(message, running) {
    const view = this.views.get(message.id);
    if (!view?.root.isConnected) return;
    const all = children(this.conversation, message.parent);
    view.update(message, { running, isLast: true, others: { all, at: all.indexOf(message) } });
    this.keepEnd();
  }

  drawLater(id, draw) {
    if (!this.due.has(id)) this.nearing.observe(this.views.get(id).root);
    this.due.set(id, draw);
    if (this.isIdling) return;
    this.isIdling = true;
    const idle = (deadline) => {
      // The last ones first: they are nearest to where the reader begins.
      for (const due of [...this.due.keys()].reverse()) {
        if (deadline.timeRemaining() < IDLE_MS) break;
        this.drawDue(due);
      }
      if (this.due.size) (globalThis.requestIdleCallback ?? waited)(idle);
      else this.isIdling = false;
    };
    (globalThis.requestIdleCallback ?? waited)(idle);
  }

  drawDue(id) {
    const draw = this.due.get(id);
    this.due.delete(id);
    const root = this.views.get(id)?.root;
    if (root) this.nearing.unobserve(root);
    draw?.();
  }

  /** Open the editor of a question: `id`, or the last one. */
  edit(id = path(this.conversation).findLast(({ role }) => role === "user")?.id) {
    const message = this.conversation.messages[id];
    if (message) this.views.get(id).edit(message, (content) => this.actions.edited(id, content));
  }

  async clicked(event) {
    const act = event.target.closest("[data-act]")?.dataset.act;
    const id = event.target.closest("[data-id]")?.dataset.id;
    if (event.target.closest(".thinking > summary")) {
      this.showsThinking = !event.target.closest("details").open; // it toggles after the click
      this.actions.thinkingShown(this.showsThinking);
    }
    if (!act) return;
    const message = this.conversation.messages[id];
    if (act === "copy-code") {
      const node = event.target.closest("button");
      if (await this.actions.copy(node.closest(".code").querySelector("code").textContent)) confirmed(node);
    }
    if (act === "copy") {
      const node = event.target.closest("button");
      if (await this.actions.copy(message.content)) confirmed(node);
    }
    if (act === "edit") this.edit(id);
    if (act === "regenerate") this.actions.regenerate(id);
    if (act === "continue") this.actions.goOn(id);
    if (act === "before" || act === "after") {
      const siblings = children(this.conversation, message.parent);
      const other = siblings[siblings.indexOf(message) + (act === "before" ? -1 : 1)];
      this.actions.select(other.id);
      this.views.get(other.id)?.root.querySelector(`[data-act=${act}]:enabled, [data-act]`)?.focus();
    }
  }

  // --- the reader's place ------------------------------------------------------------------------

  get distance() {
    return this.place.scrollHeight - this.place.scrollTop - this.place.clientHeight;
  }

  scrolled() {
    this.isFollowing = this.distance < NEAR_END_PX;
    this.toEnd.hidden = this.isFollowing;
  }

  follow() {
    this.isFollowing = true;
    this.keepEnd();
  }

  keepEnd() {
    if (this.isFollowing) this.place.scrollTop = this.place.scrollHeight;
    this.toEnd.hidden = this.isFollowing || this.distance < NEAR_END_PX;
  }
}

class MessageView {
  constructor(message, showsThinking) {
    const name = message.role === "user" ? "You" : "Model";
    this.root = make("li", { className: message.role, data: { id: message.id } });
    this.root.append(make("h3", { className: "hidden", textContent: name }));
    this.foot = make("div", { className: "foot" });
    this.body = make("div", { className: message.role === "user" ? "bubble" : "answer" });
    this.root.append(this.body, this.foot);
    this.showsThinking = showsThinking;
    this.shown = null; // what all of it was drawn from
  }

  get isDrawn() {
    return this.shown !== null;
  }

  update(message, context) {
    const { running, isLast, others } = context;
    const { content, reasoning_content: thought, error, stopped, cut, told } = message;
    const calls = JSON.stringify(message.tool_calls);
    const isElsewhere = running !== message && isBeingWritten(message);
    const shown = [running === message, Boolean(running), isElsewhere, isLast, others.all.length, others.at, content, thought, error, stopped, cut, told?.usage, calls];
    if (this.shown?.every((each, i) => each === shown[i])) return;
    this.shown = shown;
    if (message.role === "user") this.showQuestion(message);
    else this.showAnswer(message, context.running === message);
    const foot = make("div", {}, ...footOf(message, context));
    morph(this.foot, foot);
  }

  showQuestion(message) {
    if (this.asked === message) return; // a question never changes: an edit is a branch
    this.asked = message;
    this.editor?.remove();
    this.body.hidden = false;
    this.body.replaceChildren(...(message.files ?? []).map(attachedFile));
    if (message.content) this.body.append(make("div", { className: "said", textContent: message.content }));
  }

  showAnswer(message, isRunning) {
    if (!this.said) {
      this.said = make("div", { className: "said" });
      this.after = make("div");
      this.body.append(this.said, this.after);
      this.text = new MarkdownView(this.said, message.id);
    }
    this.root.classList.toggle("running", isRunning);
    this.root.setAttribute("aria-busy", String(isRunning));
    if (message.reasoning_content) this.showThinking(message, isRunning && !message.content);
    this.text.update(message.content);
    const after = make("div", {}, ...(message.tool_calls ?? []).map(calledTool));
    if (message.error) after.append(make("p", { className: "wrong", textContent: message.error }));
    morph(this.after, after);
  }

  showThinking(message, isThinking) {
    if (!this.thinking) {
      this.thinking = make("details", { className: "thinking", open: this.showsThinking });
      this.thinking.append(make("summary"), make("div"));
      this.thought = new MarkdownView(this.thinking.lastChild, `${message.id}t`);
      this.body.prepend(this.thinking);
    }
    const { thoughtMs } = message.told ?? {};
    const words = isThinking ? "Thinking" : `Thought${thoughtMs ? ` for ${duration(thoughtMs)}` : ""}`;
    const summary = this.thinking.firstChild;
    if (summary.textContent !== words) summary.textContent = words;
    this.thinking.classList.toggle("running", isThinking);
    this.thought.update(message.reasoning_content);
  }

  /** Show an editor instead of the question; an empty text is not sent. */
  edit(message, done) {
    this.editor?.remove();
    const area = make("textarea", { value: message.content, rows: 3, ariaLabel: "Edit the question" });
    const close = () => {
      this.editor.remove();
      this.body.hidden = this.foot.hidden = false;
      this.foot.querySelector("[data-act=edit]")?.focus();
    };
    const send = button("Send", () => {
      const text = area.value.trim();
      if (!text && !message.files?.length) return;
      close();
      done(text);
    }, { className: "main" });
    const check = () => { send.disabled = !area.value.trim() && !message.files?.length; };
    area.addEventListener("input", check);
    area.addEventListener("keydown", (event) => {
      if (event.key === "Escape") { event.stopPropagation(); close(); }
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        send.click();
      }
    });
    this.editor = make("div", { className: "editor" }, area, make("div", { className: "row" }, button("Cancel", close), send));
    this.body.hidden = this.foot.hidden = true;
    this.root.append(this.editor);
    check();
    area.focus();
    area.setSelectionRange(area.value.length, area.value.length);
  }
}

// For browsers without idle callbacks.
const waited = (act) => setTimeout(() => act({ timeRemaining: () => 2 * IDLE_MS }), 30);

function placeAll(place, roots) {
  roots.forEach((root, i) => {
    if (place.children[i] !== root) place.insertBefore(root, place.children[i] ?? null);
  });
  while (place.children.length > roots.length) place.lastChild.remove();
}

/** A folded file of a question. */
function attachedFile({ name, text }) {
  const told = `${number(text.split("\n").length)} lines`;
  const summary = make("summary", {}, make("span", { textContent: name }), make("small", { textContent: told }));
  return make("details", { className: "file" }, summary, make("pre", { textContent: text, tabIndex: 0 }));
}

function calledTool({ function: { name, arguments: said } }) {
  const summary = make("summary", { textContent: `Calls ${name}` });
  return make("details", { className: "call" }, summary, make("pre", { textContent: said, tabIndex: 0 }));
}

// --- below a message -------------------------------------------------------------------------------

function footOf(message, { running, isLast, others }) {
  if (running === message) return [];
  const acts = make("div", { className: "acts" });
  const act = (name, label, data) => acts.append(iconButton(name, label, null, { data: { act: data } }));
  if (others.all.length > 1) acts.append(branches(others));
  if (message.content) act("copy", "Copy", "copy");
  if (!running && message.role === "user") act("edit", "Edit", "edit");
  if (!running && message.role === "assistant") {
    act("redo", "Regenerate", "regenerate");
    if (isLast && canContinue(message)) {
      acts.append(make("button", { type: "button", className: "go-on", data: { act: "continue" } }, icon("go"), "Continue"));
    }
  }
  return [...figures(message), acts];
}

function branches({ all, at }) {
  const before = iconButton("left", "Previous version", null, { disabled: at === 0, data: { act: "before" } });
  const after = iconButton("right", "Next version", null, { disabled: at === all.length - 1, data: { act: "after" } });
  return make("span", { className: "branches" }, before, make("span", { textContent: `${at + 1} / ${all.length}` }), after);
}

/** The figures of an answer in a line; unfolded, what they mean. */
function figures(message) {
  const { usage, timings, luceasync, firstMs } = message.told ?? {};
  const told = [];
  if (isBeingWritten(message)) told.push("still being written");
  else if (message.stopped) told.push("stopped");
  if (message.cut) told.push("cut off at the maximum length");
  if (timings?.predicted_per_second) told.push(`${rate(timings.predicted_per_second)} tokens/s`);
  if (firstMs !== undefined) told.push(`first token after ${duration(firstMs)}`);
  const cached = usage?.prompt_tokens_details?.cached_tokens ?? 0;
  if (usage) told.push(`${number(cached)} of ${number(usage.prompt_tokens)} prompt tokens cached`);
  if (!told.length) return [];
  if (!timings || !luceasync) return [make("p", { className: "figures", textContent: told.join(" · ") })];
  const all = { prompt: usage.prompt_tokens, cached, written: usage.completion_tokens, timings, luceasync };
  const story = explained(all).map((words) => make("li", { textContent: words }));
  const summary = make("summary", { textContent: told.join(" · "), title: "What made it this fast, or slow" });
  const details = make("details", { className: "figures" }, summary);
  details.append(make("div", {}, timeBar({ timings, luceasync }), make("ul", {}, ...story)));
  return [details];
}

/** Say on the button itself that it has copied. */
function confirmed(node) {
  const before = [...node.childNodes];
  if (node.classList.contains("done")) return;
  node.classList.add("done");
  node.replaceChildren(node.classList.contains("icon") ? icon("check") : "Copied");
  setTimeout(() => {
    node.classList.remove("done");
    node.replaceChildren(...before);
  }, 1500);
}
