// Requests to the server, and streamed answers.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/**
 * Send a chat request, and call `take(said, chunk)` for each event. `said` is the answer so far, in
 * the form in which it is sent back.
 * @throws {Refused} also if the stream breaks off; AbortError when `signal` aborts.
 */
export async function ask(body, key, signal, take) {
  const request = { ...body, stream: true, stream_options: { include_usage: true } };
  const headers = { "content-type": "application/json", ...authorization(key) };
  const response = await sent("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(request), signal });
  const said = { content: "" };
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(500, chunk.error.message);
    for (const choice of chunk.choices) add(said, choice.delta);
    take(said, chunk);
  }
  throw new Refused(500, "The answer was cut off: the connection to the server was lost.");
}

/** @returns {Promise<any>} the JSON at `path`. */
export async function get(path, key) {
  return (await sent(path, { headers: authorization(key) })).json();
}

/** Call `take` with each status that the server sends, until `signal` aborts or the stream ends. */
export async function follow(path, key, signal, take) {
  const response = await sent(path, { headers: authorization(key), signal });
  for await (const data of events(response.body)) take(JSON.parse(data));
}

const authorization = (key) => (key ? { authorization: `Bearer ${key}` } : {});

async function sent(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, "The server cannot be reached.");
  }
  if (!response.ok) throw new Refused(response.status, await refusal(response));
  return response;
}

async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

function add(said, delta) {
  said.content += delta.content ?? "";
  if (delta.reasoning_content) said.reasoning_content = (said.reasoning_content ?? "") + delta.reasoning_content;
  for (const call of delta.tool_calls ?? []) {
    said.tool_calls ??= [];
    const made = () => ({ id: call.id, type: "function", function: { name: call.function.name, arguments: "" } });
    const known = (said.tool_calls[call.index] ??= made());
    known.function.arguments += call.function.arguments ?? "";
  }
}

// Yields the data of server-sent events, without comments.
async function* events(body) {
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
