// Requests to the server, and streamed answers.

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

// Sends a chat request, and calls `take(message, chunk)` for each event. `message` is the answer so
// far, in the form in which it is sent back. Throws Refused, or AbortError when `signal` aborts.
export async function ask(body, key, signal, take) {
  const headers = { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const request = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(request), signal });
  if (!response.ok) throw await refused(response);
  const message = { role: "assistant", content: "" };
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return message;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(500, chunk.error.message);
    for (const choice of chunk.choices) add(message, choice.delta);
    take(message, chunk);
  }
  throw new Refused(500, "The answer was cut off.");
}

export async function get(path, key) {
  const response = await fetch(path, { headers: key ? { authorization: `Bearer ${key}` } : {} });
  if (!response.ok) throw await refused(response);
  return response.json();
}

function add(message, delta) {
  message.content += delta.content ?? "";
  if (delta.reasoning_content) message.reasoning_content = (message.reasoning_content ?? "") + delta.reasoning_content;
  for (const call of delta.tool_calls ?? []) {
    message.tool_calls ??= [];
    const known = message.tool_calls[call.index] ??= { id: call.id, type: "function", function: { name: call.function.name, arguments: "" } };
    known.function.arguments += call.function.arguments ?? "";
  }
}

export async function refused(response) {
  return new Refused(response.status, await refusal(response));
}

async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

// Yields the data of server-sent events, without comments.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    buffer += value;
    const whole = buffer.split("\n\n");
    buffer = whole.pop();
    for (const event of whole) {
      for (const line of event.split("\n")) if (line.startsWith("data: ")) yield line.slice(6);
    }
  }
}
