// Answers that are being written: one in each conversation at most.

import { ask } from "./api.js";
import { WRITING_MS, append, path, requestMessages } from "./conversation.js";

/** @typedef {import("./conversation.js").Conversation} Conversation
 *  @typedef {import("./conversation.js").Message} Message
 *
 * @typedef {object} Watcher
 * @property {(conversation: Conversation, message: Message) => void} grown at most once a frame
 * @property {(conversation: Conversation, message: Message, error: Error | null) => void} ended
 */

export class Answers {
  /** @param {Watcher} watcher
   * @param {() => {fields: object, key: string}} settings of a request */
  constructor(watcher, settings) {
    this.watcher = watcher;
    this.settings = settings;
    this.running = new Map(); // by conversation id: { message, abort }
  }

  /** @returns {Message | null} the answer that is being written there. */
  of(conversation) {
    return this.running.get(conversation.id)?.message ?? null;
  }

  stop(conversation) {
    this.running.get(conversation.id)?.abort.abort();
  }

  /** Answer what the conversation's head says. */
  begin(conversation) {
    const message = append(conversation, conversation.head, { role: "assistant", content: "" });
    const messages = requestMessages(conversation, path(conversation).slice(0, -1));
    return this.run(conversation, message, { messages });
  }

  /** Write on at the end of the conversation's last answer. */
  goOn(conversation) {
    const message = path(conversation).at(-1);
    message.cut = false;
    delete message.error;
    const messages = requestMessages(conversation);
    return this.run(conversation, message, { messages, continue_final_message: true });
  }

  async run(conversation, message, body) {
    const abort = new AbortController();
    this.running.set(conversation.id, { message, abort });
    const { fields, key } = this.settings();
    const request = { ...fields, ...body, prompt_cache_key: conversation.id };
    const taken = new Taken(message, eachFrame(() => this.watcher.grown(conversation, message)));
    let failure = null;
    message.stopped = true; // what is kept of it meanwhile, should the page be closed
    message.writtenAt = Date.now();
    const writing = setInterval(() => {
      message.writtenAt = Date.now();
      this.watcher.grown(conversation, message);
    }, WRITING_MS);
    try {
      await ask(request, key, abort.signal, (said, chunk) => taken.take(said, chunk));
      message.stopped = false;
    } catch (error) {
      failure = error;
      message.stopped = error.name === "AbortError";
      // A TypeError is what browsers throw when a connection breaks, each in its own words.
      if (!message.stopped) message.error = error instanceof TypeError ? "The server has gone away." : error.message;
    }
    clearInterval(writing);
    message.writtenAt = 0;
    this.running.delete(conversation.id);
    this.watcher.ended(conversation, message, failure);
  }
}

/** What has come of an answer, written into its message. */
class Taken {
  constructor(message, grown) {
    this.message = message;
    this.grown = grown;
    this.begun = performance.now();
    this.before = message.content; // of an answer that is continued
    message.told = { ...(this.before && message.told) };
    this.isFirst = true;
  }

  take(said, chunk) {
    const { message } = this;
    const { told } = message;
    const ms = performance.now() - this.begun;
    message.content = this.before + said.content;
    if (said.reasoning_content && !this.before) message.reasoning_content = said.reasoning_content;
    if (said.tool_calls) message.tool_calls = said.tool_calls;
    if (this.isFirst && (said.content || said.reasoning_content || said.tool_calls)) {
      this.isFirst = false;
      told.firstMs = ms;
    }
    if (said.reasoning_content && said.content && told.thoughtMs === undefined) told.thoughtMs = ms - told.firstMs;
    if (chunk.usage) Object.assign(told, { usage: chunk.usage, timings: chunk.timings, luceasync: chunk.luceasync });
    if (chunk.choices[0]?.finish_reason === "length") message.cut = true;
    this.grown();
  }
}

// Calls `draw` at most once a frame; a hidden page has no frames, so there it waits for a timer.
function eachFrame(draw) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    const run = () => {
      isDue = false;
      draw();
    };
    if (document.hidden) setTimeout(run, 200);
    else requestAnimationFrame(run);
  };
}
