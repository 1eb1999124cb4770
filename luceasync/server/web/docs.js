// The page at /docs: sends a request of the reader's, and shows its answer as it comes.

const key = document.getElementById("key");
const find = document.getElementById("find");
const PLACEHOLDER = '"MODEL"';
const MAX_SHOWN_CHARS = 200_000;

const headers = () => (key.value ? { authorization: `Bearer ${key.value}` } : {});

/** Puts the name of the served model into the examples, once it is known. */
async function nameModel() {
  const answer = await fetch("v1/models", { headers: headers() });
  if (!answer.ok) return;
  const name = JSON.stringify((await answer.json()).data[0].id);
  for (const body of document.querySelectorAll("textarea")) {
    body.value = body.value.replace(PLACEHOLDER, () => name);
  }
}

/** The path of a form's route, with its parameters. */
function pathOf(form) {
  return form.dataset.path.slice(1).replace(/{(\w+)}/g, (_, name) =>
    encodeURIComponent(form.elements[name].value));
}

/** JSON with line breaks; anything else as it is. */
function laidOut(text, type) {
  if (!type.startsWith("application/json")) return text;
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

async function show(answer, shown) {
  const type = answer.headers.get("content-type") ?? "";
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    text = (text + value).slice(-MAX_SHOWN_CHARS);
    shown.textContent = text;
  }
  shown.textContent = laidOut(text, type);
}

async function send(form) {
  const [shown, told, stop] = ["pre", "output", ".stop"].map((name) => form.querySelector(name));
  const ending = new AbortController();
  const body = form.querySelector("textarea")?.value;
  const begun = performance.now();
  stop.onclick = () => ending.abort();
  shown.hidden = stop.hidden = false;
  shown.textContent = "";
  told.textContent = "…";
  form.querySelector("[type=submit]").disabled = true;
  try {
    const answer = await fetch(pathOf(form), {
      method: form.dataset.method,
      headers: { ...headers(), ...(body === undefined ? {} : { "content-type": "application/json" }) },
      body,
      signal: ending.signal,
    });
    told.textContent = `${answer.status} ${answer.statusText}`;
    await show(answer, shown);
    told.textContent += `, ${Math.round(performance.now() - begun)} ms`;
  } catch (error) {
    told.textContent = error.name === "AbortError" ? "stopped" : String(error.message);
  } finally {
    stop.hidden = true;
    form.querySelector("[type=submit]").disabled = false;
  }
}

/** Shows the operations in which all of the words occur. */
function filter() {
  const words = find.value.toLowerCase().split(/\s+/).filter(Boolean);
  for (const section of document.querySelectorAll("section")) {
    for (const fold of section.querySelectorAll("details")) {
      const text = fold.querySelector("summary").textContent.toLowerCase();
      fold.hidden = !words.every((word) => text.includes(word));
    }
    section.hidden = !section.querySelector("details:not([hidden])");
  }
}

/** Opens the fold that the address names, which a search may have hidden. */
function unfold() {
  const named = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!named?.matches("details")) return;
  named.open = true;
  named.hidden = named.closest("section").hidden = false;
  named.scrollIntoView();
}

document.addEventListener("submit", (event) => {
  event.preventDefault();
  send(event.target);
});
document.addEventListener("toggle", (event) => {
  if (event.target.open && event.target.id) history.replaceState(null, "", `#${event.target.id}`);
}, true);
find.addEventListener("input", filter);
key.addEventListener("change", nameModel);
window.addEventListener("hashchange", unfold);
unfold();
nameModel();
