// The live view: lanes, queue, cached prefixes and devices, from the server's status events.

import { events, refused } from "./answer.js";
import { make } from "./dom.js";

const RECONNECT_MS = 2000;

export class Live {
  constructor(place, keyOf) {
    this.place = place;
    this.keyOf = keyOf;
    this.watching = null; // the AbortController of the stream
  }

  open() {
    this.watching = new AbortController();
    this.watch(this.watching.signal);
  }

  close() {
    this.watching?.abort();
    this.watching = null;
  }

  async watch(signal) {
    while (!signal.aborted) {
      try {
        const key = this.keyOf();
        const headers = key ? { authorization: `Bearer ${key}` } : {};
        const response = await fetch("status/events", { headers, signal });
        if (!response.ok) throw await refused(response);
        for await (const data of events(response.body)) this.show(JSON.parse(data));
      } catch (error) {
        if (signal.aborted) return;
        const words = error.status ? error.message : "The server cannot be reached.";
        this.place.replaceChildren(make("p", { className: "wrong", textContent: words }));
      }
      await new Promise((done) => setTimeout(done, RECONNECT_MS));
    }
  }

  show(status) {
    const { live } = status;
    if (!live) {
      this.place.replaceChildren(make("p", { textContent: status.detail }));
      return;
    }
    this.place.replaceChildren(
      part("Lanes", `${status.num_running} of ${status.num_lanes} running`, lanes(status, live)),
      part("Queue", `${status.num_queued} waiting`, list(live.waiting, (one) => (
        `${one.prompt_tokens} tokens, waiting for ${seconds(one.waiting_s)}`
      ), "Empty")),
      part("Cached prefixes", cached(status, live), tree(live.nodes)),
      part("Speculation", "", figures(speculation(status))),
      part("Devices and processes", "", figures(devices(status, live))),
    );
  }
}

function part(title, told, body) {
  const heading = make("h3", { textContent: title });
  if (told) heading.append(make("span", { textContent: told }));
  return make("section", {}, heading, body);
}

function lanes(status, live) {
  const running = new Map(live.lanes.map((lane) => [lane.lane, lane]));
  const rows = Array.from({ length: status.num_lanes }, (_, place) => lane(place, running.get(place)));
  return make("ul", { className: "lanes" }, ...rows);
}

function lane(place, told) {
  const item = make("li", {}, make("b", { textContent: `Lane ${place}` }));
  if (!told) {
    item.append(make("span", { textContent: "free" }));
    return item;
  }
  const isDecoding = told.phase === "decoding" || told.phase === "unread";
  const [value, max] = isDecoding ? [told.generated_tokens, told.max_tokens] : [told.done_tokens, told.prompt_tokens];
  const bar = make("progress", { value, max: Math.max(1, max) });
  bar.setAttribute("aria-label", `Lane ${place}, ${told.phase}`);
  const words = [
    told.phase,
    `${told.done_tokens} of ${told.prompt_tokens} prompt tokens, ${told.cached_tokens} cached`,
    `${told.generated_tokens} generated`,
    ...(told.tau ? [`tau ${told.tau.toFixed(2)} in ${told.rounds} rounds`] : []),
    ...(told.resident_tokens === null ? [] : [`${told.resident_tokens} tokens on devices, ${told.absent_tokens} absent`]),
    seconds(told.running_s),
  ];
  item.append(bar, make("span", { textContent: words.join(" · ") }));
  return item;
}

function cached(status, live) {
  const tiers = Object.entries(status.cache?.num_bytes ?? {});
  const sums = tiers.map(([tier, bytes]) => `${tier} ${size(bytes)}`);
  return [`${live.num_nodes} nodes`, ...sums].join(" · ");
}

// Nodes below their parents; a node whose parent is not listed is a root.
function tree(nodes) {
  const below = new Map();
  const known = new Set(nodes.map((node) => node.key));
  for (const node of nodes) {
    const parent = known.has(node.parent) ? node.parent : null;
    below.set(parent, [...(below.get(parent) ?? []), node]);
  }
  const branch = (key) => make("ul", {}, ...(below.get(key) ?? [])
    .sort((one, other) => one.begin - other.begin || other.hits - one.hits)
    .map((node) => make("li", {}, leaf(node), ...(below.has(node.key) ? [branch(node.key)] : []))));
  if (!nodes.length) return make("p", { textContent: "Empty" });
  const root = branch(null);
  root.className = "tree";
  return root;
}

function leaf(node) {
  const tiers = Object.entries(node.num_bytes).map(([tier, bytes]) => (
    make("span", { className: `tier ${tier}`, textContent: `${tier} ${size(bytes)}` })
  ));
  const words = `tokens ${node.begin} to ${node.end} · restored ${node.hits} times · used ${seconds(node.idle_s)} ago`;
  return make("div", {}, make("span", { textContent: words }), ...tiers);
}

function speculation(status) {
  const told = status.speculation;
  if (!told) return [["draft", "none"]];
  return [
    ["rounds", told.rounds_total],
    ["tokens per round", told.tau.toFixed(2)],
    ["accepted", `${told.accepted_total} of ${told.proposed_total}`],
  ];
}

function devices(status, live) {
  return [
    ...Object.entries(live.device_bytes ?? {}).map(([name, bytes]) => [name, `${size(bytes)} of weights and lanes`]),
    ...status.processes.map((one) => [one.name, one.detail || `${one.devices.join(", ")}, ${size(one.resident_bytes)}`]),
  ];
}

function figures(rows) {
  const pairs = rows.flatMap(([name, value]) => (
    [make("dt", { textContent: name }), make("dd", { textContent: String(value) })]
  ));
  return make("dl", {}, ...pairs);
}

function list(items, words, none) {
  if (!items.length) return make("p", { textContent: none });
  return make("ul", {}, ...items.map((item) => make("li", { textContent: words(item) })));
}

function size(bytes) {
  if (bytes < 2 ** 20) return `${(bytes / 2 ** 10).toFixed(0)} KiB`;
  return bytes < 2 ** 30 ? `${(bytes / 2 ** 20).toFixed(1)} MiB` : `${(bytes / 2 ** 30).toFixed(2)} GiB`;
}

function seconds(value) {
  return value < 120 ? `${value.toFixed(value < 10 ? 1 : 0)} s` : `${Math.round(value / 60)} min`;
}
