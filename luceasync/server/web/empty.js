// The page before the first question: which model this is, and questions to begin with.

import { button, make } from "./dom.js";
import { number, parameters } from "./words.js";

const STARTERS = [
  ["Explain", "Explain how a hash table works, with a small example."],
  ["Write code", "Write a Python function that merges overlapping intervals, with two tests."],
  ["Improve a text", "Make this friendlier and shorter: \"Your request was rejected because the form is incomplete.\""],
  ["Plan", "Plan a weekend in a city that I have never seen, on foot and on a small budget."],
];
const STDLIB_STARTERS = [ // what the bundled model has learnt
  ["json", "What does json.dumps do?"],
  ["os.path", "What does os.path.join do?"],
  ["itertools", "What does itertools.chain do?"],
  ["re", "What does re.sub do?"],
];
const BUNDLED = "stdlib-15m";

/**
 * Show it in `place`, unless it is there. `status`: the server's, or null before it is known; `ask`
 * takes a question; `enterKey`: lets the user enter an API key, null if none is needed.
 */
export function showEmpty(place, status, { ask, enterKey }) {
  const words = enterKey ? "This server needs an API key." : about(status);
  const shown = `${status?.model} ${words}`;
  if (place.dataset.shown === shown) return;
  place.dataset.shown = shown;
  const isBundled = status?.model === BUNDLED;
  const starters = (isBundled ? STDLIB_STARTERS : STARTERS).map(([title, text]) => {
    const card = make("button", { type: "button", className: "starter" }, make("b", { textContent: title }), make("span", { textContent: text }));
    card.addEventListener("click", () => ask(text));
    return card;
  });
  place.replaceChildren(
    make("h2", { textContent: status ? status.model : "luceasync" }),
    make("p", { textContent: words }),
    ...(isBundled ? [make("p", { textContent: "A small demonstration model. It answers questions about Python's standard library, and nothing else." })] : []),
    ...(status && !status.takes_chats ? [make("p", { className: "wrong", textContent: "This model has no chat template: it can only continue texts, through the API." })] : []),
    ...(enterKey ? [button("Enter the key", enterKey, { className: "main" })] : []),
    make("div", { className: "starters" }, ...(status?.ready && status.takes_chats ? starters : [])),
  );
}

function about(status) {
  if (!status) return "Connecting to the server …";
  if (!status.ready) return `Not ready yet: ${status.detail}`;
  const told = [
    status.num_parameters ? parameters(status.num_parameters) : "",
    status.family.replace(/(\d)_(\d)/, "$1.$2"),
    `${number(status.max_ctx_tokens)} tokens of context`,
    `${status.num_lanes} at a time`,
    status.speculation ? "speculative decoding" : "",
  ];
  return told.filter(Boolean).join(" · ");
}
