// One answer of the server: what it is asked, and what comes back, event by event.

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

// Asks, and calls `take(message, chunk)` for each event. `message` is the answer so far, as it is to
// be sent back. Throws Refused, or AbortError where `signal` ends it.
export async function ask(body, key, signal, take) {
  const headers = { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const wanted = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(wanted), signal });
  if (!response.ok) throw await refused(response);
  const message = { role: "assistant", content: "" };
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return message;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(500, chunk.error.message);
    for (const choice of chunk.choices) add(message, choice.delta);
    take(message, chunk);
  }
  throw new Refused(500, "The answer broke off.");
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

// The data of server-sent events; comments are left out.
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    const whole = held.split("\n\n");
    held = whole.pop();
    for (const event of whole) {
      for (const line of event.split("\n")) if (line.startsWith("data: ")) yield line.slice(6);
    }
  }
}
