// Ollama's own package for JavaScript; each case is told as a line of JSON.
import assert from "node:assert";
import { Ollama } from "ollama";
import { tell } from "./told.mjs";

const ollama = new Ollama({ host: process.env.LUCE_URL });
const model = "luce";
const words = "A few words about it";
const long = "What does json.dumps do, and what does it not do? ".repeat(12);
const look = 'Look it up. [[look_up {"name": "json.dumps", "depth": 3}]] [[say It writes JSON]]';
const hello = [{ role: "user", content: "Hello" }];
const parameters = {
  type: "object",
  properties: { name: { type: "string" }, depth: { type: "integer" } },
  required: ["name"],
};
const tools = [{ type: "function", function: { name: "look_up", description: "", parameters } }];

const cases = {
  async lists() {
    assert.equal((await ollama.list()).models[0].model, model);
    assert.equal((await ollama.ps()).models[0].name, model);
    assert((await ollama.show({ model })).capabilities.includes("tools"));
    assert((await ollama.version()).version);
  },
  async chat() {
    const messages = [{ role: "user", content: long }];
    const first = await ollama.chat({ model, messages });
    assert.equal(first.message.content, words);
    messages.push(first.message, { role: "user", content: "And json.loads?" });
    const second = await ollama.chat({ model, messages });
    const cached = second.luceasync.prefix_tokens;
    assert(cached >= first.prompt_eval_count - 16, `${cached} of ${first.prompt_eval_count}`);
  },
  async stream() {
    let text = "", last;
    for await (const part of await ollama.chat({ model, messages: hello, stream: true })) {
      text += part.message.content;
      last = part;
    }
    assert.equal(text, words);
    assert(last.done && last.eval_count > 0 && last.eval_duration > 0);
  },
  async tools() {
    const messages = [{ role: "user", content: look }];
    let called;
    for await (const part of await ollama.chat({ model, messages, tools, stream: true })) {
      if (part.message.tool_calls) called = part.message;
    }
    assert.deepEqual(called.tool_calls[0].function.arguments, { name: "json.dumps", depth: 3 });
    messages.push(called, { role: "tool", tool_name: "look_up", content: "It writes" });
    const second = await ollama.chat({ model, messages, tools });
    assert.equal(second.message.content, "It writes JSON");
  },
  async generate() {
    assert.equal((await ollama.generate({ model, prompt: "Hello" })).response, words);
    let text = "";
    for await (const part of await ollama.generate({ model, prompt: "Hello", stream: true })) {
      text += part.response;
    }
    assert.equal(text, words);
  },
  async abort() {
    const stream = await ollama.chat({ model, messages: hello, stream: true });
    await assert.rejects(async () => {
      for await (const part of stream) stream.abort();
    }, { name: "AbortError" });
  },
  async errors() {
    const refused = [
      [404, () => ollama.chat({ model: "other", messages: hello })],
      [400, () => ollama.chat({ model, messages: hello, options: { mirostat: 1 } })],
      [400, () => ollama.chat({ model, messages: hello, think: "much", stream: true })],
      [400, () => ollama.embed({ model, input: "x" })],
      [400, () => ollama.pull({ model: "llama3" })],
      [400, () => ollama.delete({ model })],
    ];
    for (const [status_code, ask] of refused) await assert.rejects(ask, { status_code });
  },
};

await tell(cases);
