// The live view: what the server does, from its status events.

import { follow } from "./api.js";
import { Charts } from "./charts.js";
import { make } from "./dom.js";
import { morph } from "./morph.js";
import { timeBar } from "./timebar.js";
import { TreeView } from "./tree.js";
import { MISSED, duration, explained, laneStory, number, rate, size, tokens } from "./words.js";

const RECONNECT_MS = 2000;
const TREE_EVERY_MS = 2000; // a large tree takes longer to draw
const PHASES = { restoring: "taking up what is kept", prefilling: "reading the prompt", decoding: "writing", unread: "its client does not read" };
const SETTLED = "nothing runs";

/**
 * @typedef {object} LiveContext
 * @property {() => string} key the API key
 * @property {(label: string) => string | null} titleOf the title of one of this browser's conversations
 * @property {import("./series.js").Series} series
 * @property {(status: object) => void} took called with each status, which fills the series
 */

export class Live {
  /** @param {HTMLElement} place
   * @param {LiveContext} context */
  constructor(place, context) {
    this.place = place;
    this.context = context;
    this.watching = null; // the AbortController of the stream
    this.parts = new Map(); // by title: a section's body
    this.treeDrawnMs = -Infinity;
  }

  get isOpen() {
    return this.watching !== null;
  }

  open() {
    if (this.isOpen) return;
    if (!this.charts) this.build();
    this.watching = new AbortController();
    this.watch(this.watching.signal);
  }

  close() {
    this.watching?.abort();
    this.watching = null;
  }

  build() {
    this.problem = make("p", { className: "wrong", role: "alert", hidden: true });
    const charts = make("div", { className: "charts" });
    this.charts = new Charts(charts, this.context.series);
    this.place.replaceChildren(this.problem, charts);
    for (const title of ["Lanes", "Last answers", "Kept prefixes", "Memory", "Experts", "Processes", "Why these sizes"]) this.part(title);
    this.tree = new TreeView(this.whose);
    this.parts.get("Kept prefixes").section.append(this.tree.root);
  }

  part(title) {
    const told = make("span");
    const body = make("div");
    const section = make("section", {}, make("h3", {}, title, told), body);
    this.place.append(section);
    this.parts.set(title, { section, told, body });
  }

  /** Show what a section says; without children it is hidden. */
  fill(title, told, ...children) {
    const part = this.parts.get(title);
    part.section.hidden = !children.length;
    if (part.told.textContent !== told) part.told.textContent = told;
    morph(part.body, make("div", {}, ...children));
  }

  async watch(signal) {
    while (!signal.aborted) {
      try {
        await follow("status/events", this.context.key(), signal, (status) => this.show(status));
      } catch (error) {
        if (signal.aborted) return;
        this.tell(error.message);
      }
      await new Promise((done) => setTimeout(done, RECONNECT_MS));
    }
  }

  tell(words) {
    this.problem.hidden = !words;
    this.problem.textContent = words;
  }

  show(status) {
    this.context.took(status);
    this.charts.update();
    const { live } = status;
    this.tell(live ? "" : status.detail);
    if (!live) return;
    this.fill("Lanes", laneSummary(status), lanes(status, live, this.whose), ...waiting(live, this.whose));
    this.fill("Last answers", live.recent.length ? "the newest first; unfold one to see why it took so long" : "", answers(live.recent, this.whose));
    this.showKept(status, live);
    this.fill("Memory", "", ...devices(status, live));
    this.fill("Experts", "in slots of the devices, while all wait in host memory", ...experts(status));
    this.fill("Processes", "", ...processes(status));
    this.fill("Why these sizes", "", ...(status.reasons.length ? [list(status.reasons)] : []));
  }

  showKept(status, live) {
    const now = performance.now();
    if (now - this.treeDrawnMs < TREE_EVERY_MS) return;
    this.treeDrawnMs = now;
    const held = Object.entries(status.cache?.num_bytes ?? {}).filter(([, bytes]) => bytes);
    const sums = held.map(([tier, bytes]) => (
      `${size(bytes)} ${tier === "disk" ? "on disk" : "in memory"}`
    ));
    const shown = live.nodes.length < live.num_nodes ? `${live.nodes.length} of ${number(live.num_nodes)} nodes, those used last` : `${number(live.num_nodes)} nodes`;
    const words = live.nodes.length ? legend() : make("p", { textContent: "Nothing is kept yet." });
    this.fill("Kept prefixes", [shown, ...sums].join(" · "), list(reused(status.cache)), words);
    this.tree.update(live.nodes);
  }

  /** Whose prompts: titles of this browser's conversations, and how many are others'. */
  whose = (labels) => {
    const all = Array.isArray(labels) ? labels : [labels].filter(Boolean);
    const titles = all.map((label) => this.context.titleOf(label)).filter(Boolean);
    const others = all.length - titles.length;
    const named = titles.length ? `“${titles[0]}”${titles.length > 1 ? ` and ${titles.length - 1} more` : ""}` : "";
    if (!others) return named || "Unnamed conversation";
    const told = others === 1 ? "another client's conversation" : `${others} conversations of other clients`;
    return named ? `${named}, ${told}` : told[0].toUpperCase() + told.slice(1);
  };
}

// --- lanes ---------------------------------------------------------------------------------------

function laneSummary({ num_running: running, num_lanes: all, num_queued: queued }) {
  return [running ? `${running} of ${all} busy` : SETTLED, ...(queued ? [`${queued} waiting`] : [])].join(" · ");
}

function lanes(status, live, whose) {
  const running = new Map(live.lanes.map((lane) => [lane.lane, lane]));
  const most = Math.max(256, ...live.lanes.map((lane) => lane.prompt_tokens + lane.generated_tokens));
  const total = 2 ** Math.ceil(Math.log2(most));
  const rows = Array.from({ length: status.num_lanes }, (_, at) => laneRow(at, running.get(at), total, whose));
  const parts = [["cached", "cached"], ["computed", "computed"], ["due", "still to read"], ["written", "written"]];
  const scale = make("li", { className: "scale" }, make("b"), key(parts), make("span", { textContent: `bars are ${number(total)} tokens wide` }));
  return make("ul", { className: "lanes" }, ...rows, ...(live.lanes.length ? [scale] : []));
}

function laneRow(at, lane, total, whose) {
  const row = make("li", { data: { key: `lane ${at}` } }, make("b", { textContent: `Lane ${at}` }));
  const bar = make("div", { className: "bar" });
  row.append(bar);
  if (!lane) {
    row.append(make("span", { textContent: "free" }));
    return row;
  }
  const { prompt_tokens: prompt, done_tokens: done, cached_tokens: cached, generated_tokens: written } = lane;
  const spans = [["cached", cached], ["computed", done - cached], ["due", prompt - done], ["written", written]];
  for (const [name, count] of spans) {
    bar.append(make("span", { className: name, style: { width: `${(100 * Math.max(0, count)) / total}%` } }));
  }
  const words = [
    PHASES[lane.phase] ?? lane.phase,
    `${number(done)} of ${tokens(prompt)} read`,
    laneStory(lane),
    `${number(written)} written`,
    lane.tau ? `${lane.tau.toFixed(1)} tokens a step` : "",
    lane.absent_tokens ? `${number(lane.absent_tokens)} tokens not on the devices` : "",
    `for ${duration(lane.running_s * 1000)}`,
  ];
  row.append(make("span", {}, make("strong", { textContent: whose(lane.conversation) }), ` ${words.filter(Boolean).join(" · ")}`));
  return row;
}

function waiting(live, whose) {
  if (!live.waiting.length) return [];
  const items = live.waiting.map((one) => `${whose(one.conversation)}: ${tokens(one.prompt_tokens)}, waiting for ${duration(one.waiting_s * 1000)}`);
  return [make("h4", { textContent: "Waiting, because all lanes are taken" }), list(items)];
}

// --- answers -------------------------------------------------------------------------------------

function answers(recent, whose) {
  if (!recent.length) return make("p", { textContent: "None since the start." });
  return make("ul", { className: "answers" }, ...recent.map((answer) => {
    const { prompt_tokens: prompt, cached_tokens: cached, completion_tokens: written, timings, luceasync } = answer;
    const sum = timings.queued_ms + luceasync.restore_ms + timings.prompt_ms + timings.predicted_ms;
    const told = [duration(sum), `${number(cached)} of ${tokens(prompt)} cached`, `${number(written)} written`];
    if (timings.predicted_per_second) told.push(`${rate(timings.predicted_per_second)} tokens/s`);
    const summary = make("summary", {}, make("strong", { textContent: whose(answer.conversation) }), make("span", { textContent: told.join(" · ") }));
    const story = explained({ prompt, cached, written, timings, luceasync });
    const data = { key: [prompt, written, ...Object.values(timings)].join(" ") }; // tells it from the others
    return make("li", { data }, make("details", {}, summary, timeBar({ timings, luceasync }), list(story)));
  }));
}

// --- what is kept --------------------------------------------------------------------------------

function legend() {
  return key([["memory", "in memory"], ["disk", "on disk"], ["both", "in both"]]);
}

function key(parts) {
  return make("div", { className: "key" }, ...parts.map(([name, words]) => make("span", { className: name, textContent: words })));
}

/** What prompts since the start went on from, and why others did not. */
function reused(cache) {
  if (!cache) return ["Nothing is kept: the cache is off."];
  const said = [];
  const prompts = (count) => `${number(count)} prompt${count === 1 ? "" : "s"}`;
  for (const [tier, count] of Object.entries(cache.restored_total)) {
    if (count) said.push(`${prompts(count)} went on from ${tier === "disk" ? "the disk" : tier}: ${tokens(cache.restored_tokens_total[tier] ?? 0)} were not computed again.`);
  }
  for (const [reason, count] of Object.entries(cache.missed_total)) {
    if (count) said.push(`${prompts(count)} began anew, because ${MISSED[reason] ?? reason}.`);
  }
  if (cache.num_unwritten) said.push(`${number(cache.num_unwritten)} nodes are still to be written to the disk.`);
  if (cache.degraded) said.push(`The disk fails: ${cache.degraded}`);
  return said;
}

// --- memory and processes ------------------------------------------------------------------------

function devices(status, live) {
  const kept = status.cache?.num_bytes.memory ?? 0;
  const rows = Object.entries(live.device_parts ?? {}).map(([name, { weights, lanes: own, free_before: free }]) => {
    const parts = [["weights", weights], ["state", own]];
    if (isHost(name)) parts.push(["kept", kept]);
    return memoryRow(name, parts, free);
  });
  if (rows.length && !Object.keys(live.device_parts).some(isHost) && kept) rows.push(memoryRow("host", [["kept", kept]], kept));
  return rows.length ? [make("ul", { className: "devices" }, ...rows)] : [];
}

const isHost = (device) => /^cpu\b/.test(device);
const MEMORY = { weights: "weights", state: "lanes' keys, values and states", kept: "kept prefixes" };

function memoryRow(name, parts, free) {
  const sum = parts.reduce((all, [, bytes]) => all + bytes, 0);
  const total = Math.max(free, sum, 1);
  const spans = parts.map(([part, bytes]) => make("span", { className: part, style: { width: `max(2px, ${(100 * bytes) / total}%)` } }));
  const words = parts.map(([part, bytes]) => make("span", { className: part, textContent: `${MEMORY[part]} ${size(bytes)}` }));
  const rest = total > sum ? [make("span", { className: "free", textContent: `${size(total - sum)} more were free at the start` })] : [];
  return make("li", {}, make("b", { textContent: name }), make("div", { className: "bar" }, ...spans), make("div", { className: "key" }, ...words, ...rest));
}

/** Where steps have met experts that wait in host memory. */
function experts({ experts: met }) {
  if (!met) return [];
  const share = (count) => `${((100 * count) / Math.max(1, met.distinct_total)).toFixed(1)} %`;
  const parts = [["hits", met.hits_total], ["misses", met.misses_total], ["through", met.read_through_total]];
  const spans = parts.map(([part, count]) => make("span", { className: part, style: { width: share(count).replace(" ", "") } }));
  const words = parts.map(([part, count]) => make("span", { className: part, textContent: `${EXPERTS[part]} ${share(count)}` }));
  const told = `${number(met.distinct_total)} met, each once in a step and a layer · ${size(met.num_bytes_total)} copied or read from host memory`;
  return [make("ul", { className: "devices" }, make("li", {}, make("b", { textContent: "met" }), make("div", { className: "bar" }, ...spans), make("div", { className: "key" }, ...words))), make("p", { textContent: told })];
}

const EXPERTS = { hits: "in a slot", misses: "copied to a slot", through: "read in host memory" };

function processes({ processes: all, speculation }) {
  const rows = all.map((one) => {
    const told = one.detail || [`works on ${one.devices.join(", ")}`, size(one.resident_bytes), ...(one.num_starts > 1 ? [`started ${one.num_starts} times`] : [])].join(" · ");
    return make("li", { className: one.detail ? "ill" : "well" }, make("b", { textContent: one.name }), make("span", { textContent: told }));
  });
  if (speculation?.off_reason) rows.push(make("li", { className: "ill" }, make("b", { textContent: "drafter" }), make("span", { textContent: speculation.off_reason })));
  return rows.length ? [make("ul", { className: "processes" }, ...rows)] : [];
}

function list(sentences) {
  return make("ul", { className: "plain" }, ...sentences.map((words) => make("li", { textContent: words })));
}
