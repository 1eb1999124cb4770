// OpenAI's, Anthropic's and Vercel's packages; each case is told as a line of JSON.
import Anthropic from "@anthropic-ai/sdk";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import assert from "node:assert";
import OpenAI from "openai";
import { z } from "zod";
import { tell } from "./told.mjs";

const url = process.env.LUCE_URL;
const model = "luce";
const words = "A few words about it";
const long = "What does json.dumps do, and what does it not do? ".repeat(12);
const look = 'Look it up. [[look_up {"name": "json.dumps", "depth": 3}]] [[say It writes JSON]]';
const found = "json.dumps writes an object as text";
const schema = {
  type: "object",
  properties: { name: { type: "string" }, depth: { type: "integer" } },
  required: ["name"],
};
const covers = (cached, first) => assert(cached >= first - 16, `${cached} of ${first}`);
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "k", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "k", maxRetries: 0 });
const vercel = createOpenAICompatible({
  name: "luce", baseURL: `${url}/v1`, apiKey: "k", includeUsage: true,
});
const lookUp = tool({
  description: "Looks a name up.",
  inputSchema: z.object({ name: z.string(), depth: z.number().int() }),
  execute: async () => found,
});

const cases = {
  async openai_chat_stream() {
    const stream = openai.chat.completions.stream({
      model, messages: [{ role: "user", content: "Hello" }],
      stream_options: { include_usage: true },
    });
    const final = await stream.finalChatCompletion();
    assert.equal(final.choices[0].message.content, words);
    assert(final.usage.completion_tokens > 0);
  },
  async openai_tools() {
    const steps = openai.chat.completions.runTools({
      model, messages: [{ role: "user", content: look }],
      tools: [{
        type: "function",
        function: { name: "look_up", parameters: schema, parse: JSON.parse, function: () => found },
      }],
    });
    assert.equal(await steps.finalContent(), "It writes JSON");
  },
  async openai_responses() {
    const input = [{ role: "user", content: long }];
    const first = await openai.responses.create({ model, input });
    assert.equal(first.output_text, words);
    const next = { role: "user", content: "And json.loads?" };
    const second = await openai.responses.create({
      model, input: [...input, ...first.output, next],
    });
    covers(second.usage.input_tokens_details.cached_tokens, first.usage.input_tokens);
  },
  async anthropic_stream() {
    const messages = [{ role: "user", content: long }];
    const first = await anthropic.messages
      .stream({ model, max_tokens: 100, messages }).finalMessage();
    assert.equal(first.content[0].text, words);
    const next = { role: "user", content: "And json.loads?" };
    const said = { role: "assistant", content: first.content };
    const second = await anthropic.messages.create({
      model, max_tokens: 100, messages: [...messages, said, next],
    });
    const { input_tokens: run, cache_read_input_tokens: kept } = first.usage;
    covers(second.usage.cache_read_input_tokens, run + kept);
  },
  async anthropic_tools() {
    const messages = [{ role: "user", content: look }];
    const tools = [{ name: "look_up", input_schema: schema }];
    const first = await anthropic.messages.create({ model, max_tokens: 500, messages, tools });
    const call = first.content.find((block) => block.type === "tool_use");
    const result = { type: "tool_result", tool_use_id: call.id, content: found };
    messages.push(
      { role: "assistant", content: first.content },
      { role: "user", content: [result] },
    );
    const second = await anthropic.messages.create({ model, max_tokens: 500, messages, tools });
    assert.equal(second.content.at(-1).text, "It writes JSON");
  },
  async vercel_text() {
    const messages = [{ role: "user", content: long }];
    const first = await generateText({ model: vercel(model), messages, maxRetries: 0 });
    assert.equal(first.text, words);
    const next = { role: "user", content: "And json.loads?" };
    const second = await generateText({
      model: vercel(model), messages: [...messages, ...first.response.messages, next],
    });
    covers(second.usage.cachedInputTokens, first.usage.inputTokens);
  },
  async vercel_stream() {
    const stream = streamText({ model: vercel(model), prompt: "Hello", maxRetries: 0 });
    let text = "";
    for await (const part of stream.textStream) text += part;
    assert.equal(text, words);
  },
  async vercel_tools() {
    const run = await generateText({
      model: vercel(model), prompt: look, tools: { look_up: lookUp },
      stopWhen: stepCountIs(3), maxRetries: 0,
    });
    assert.equal(run.text, "It writes JSON");
    assert.deepEqual(run.steps[0].toolCalls[0].input, { name: "json.dumps", depth: 3 });
  },
  async vercel_completion() {
    const run = await generateText({
      model: vercel.completionModel(model), prompt: "The sky is", maxOutputTokens: 4,
      maxRetries: 0,
    });
    assert(run.text.length > 0);
  },
};

await tell(cases);
