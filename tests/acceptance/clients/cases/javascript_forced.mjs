// Vercel's and OpenAI's packages where an answer's form is forced; each case is a line of JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, Output, streamObject, tool } from "ai";
import assert from "node:assert";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { tell } from "./told.mjs";

const url = process.env.LUCE_URL;
const model = "luce";
const long = "What does json.dumps do, and what does it not do? ".repeat(12);
const verdict = z.object({
  name: z.enum(["json.dumps", "json.loads"]),
  depth: z.number().int().min(0).max(9),
});
const covers = (cached, first) => assert(cached >= first - 16, `${cached} of ${first}`);
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "k", maxRetries: 0 });
const vercel = createOpenAICompatible({
  name: "luce", baseURL: `${url}/v1`, apiKey: "k", includeUsage: true,
  supportsStructuredOutputs: true,
})(model);
const first = [{ role: "user", content: long }];
const then = (said) => [
  ...first,
  { role: "assistant", content: JSON.stringify(said) },
  { role: "user", content: "And json.loads?" },
];

const cases = {
  async openai_parse() {
    const ask = { model, response_format: zodResponseFormat(verdict, "verdict") };
    const one = await openai.chat.completions.parse({ ...ask, messages: first });
    const two = await openai.chat.completions.parse({
      ...ask, messages: then(one.choices[0].message.parsed),
    });
    verdict.parse(two.choices[0].message.parsed);
    covers(two.usage.prompt_tokens_details.cached_tokens, one.usage.prompt_tokens);
  },
  async vercel_generate_object() {
    const ask = { model: vercel, schema: verdict, maxRetries: 0 };
    const one = await generateObject({ ...ask, messages: first });
    const two = await generateObject({ ...ask, messages: then(one.object) });
    verdict.parse(two.object);
    covers(two.usage.cachedInputTokens, one.usage.inputTokens);
  },
  async vercel_generate_enum() {
    const made = await generateObject({
      model: vercel, output: "enum", enum: ["short", "long"], prompt: long, maxRetries: 0,
    });
    assert(["short", "long"].includes(made.object));
  },
  async vercel_stream_object() {
    const made = streamObject({ model: vercel, schema: verdict, messages: first, maxRetries: 0 });
    let last;
    for await (const part of made.partialObjectStream) last = part;
    assert.deepEqual(verdict.parse(await made.object), last);
  },
  async vercel_output_of_text() {
    const made = await generateText({
      model: vercel, messages: first, maxRetries: 0,
      experimental_output: Output.object({ schema: verdict }),
    });
    verdict.parse(made.experimental_output);
  },
  async vercel_must_call() {
    const made = await generateText({
      model: vercel, messages: first, toolChoice: "required", maxRetries: 0, maxOutputTokens: 200,
      tools: { judge: tool({ description: "Judges.", inputSchema: verdict }) },
    });
    assert(made.toolCalls.length > 0);
    verdict.parse(made.toolCalls[0].input);
  },
};

await tell(cases);
