// The prefix tree, drawn to scale: a row for each chain of nodes that has no branch.

import { button, make } from "./dom.js";
import { duration, number, size } from "./words.js";

const ROW_PX = 30;
const MAX_ROWS = 200; // until all are asked for
const MAX_UP_ROWS = 40; // that a line to a parent crosses

/**
 * @typedef {{key: string, parent: string | null, begin: number, end: number, num_bytes: Record<string, number>,
 *   has_state: boolean, hits: number, idle_s: number, conversation: string | null}} PrefixNode
 * @typedef {{key: string, begin: number, end: number, nodes: PrefixNode[], above: number | null, labels: string[]}} Chain
 *   of nodes, first one first; `above`: the row that it goes on from; `labels`: whose it is
 */

/**
 * Rows from the root down, at a branch the one used last first. A node whose parent is not listed is a root.
 * @param {PrefixNode[]} nodes
 * @returns {Chain[]}
 */
export function chains(nodes) {
  const below = new Map();
  const known = new Set(nodes.map(({ key }) => key));
  for (const node of nodes) {
    const parent = known.has(node.parent) ? node.parent : null;
    if (!below.has(parent)) below.set(parent, []);
    below.get(parent).push(node);
  }
  for (const each of below.values()) each.sort((one, other) => one.idle_s - other.idle_s);
  const rows = [];
  const open = (below.get(null) ?? []).map((node) => ({ node, above: null })).reverse();
  while (open.length) {
    const { node, above } = open.pop();
    const chain = [node];
    let next = below.get(node.key) ?? [];
    while (next.length === 1) {
      chain.push(next[0]);
      next = below.get(chain.at(-1).key) ?? [];
    }
    const at = rows.length;
    rows.push({ key: node.key, begin: node.begin, end: chain.at(-1).end, nodes: chain, above, labels: [] });
    for (const each of next.toReversed()) open.push({ node: each, above: at });
  }
  for (const row of rows.toReversed()) { // those below come first
    const own = row.nodes.map(({ conversation }) => conversation).filter(Boolean);
    row.labels = [...new Set([...own, ...row.labels])];
    if (row.above !== null) rows[row.above].labels.push(...row.labels);
  }
  return rows;
}

/** The rows in a place; only what has changed is drawn again. */
export class TreeView {
  /** @param {(labels: string[]) => string} whose says whose prompts begin so */
  constructor(whose) {
    this.whose = whose;
    this.rows = new Map(); // by key: { drawn, node }
    this.list = make("ul", { className: "tree" });
    this.isWhole = false;
    this.more = button("", () => {
      this.isWhole = true;
      this.update(this.nodes);
    });
    this.root = make("div", {}, this.list, this.more);
  }

  /** @param {PrefixNode[]} nodes */
  update(nodes) {
    this.nodes = nodes;
    const all = chains(nodes);
    const total = all.reduce((most, { end }) => Math.max(most, end), 1);
    const shown = this.isWhole ? all : all.slice(0, MAX_ROWS);
    this.more.hidden = shown.length === all.length;
    this.more.textContent = `Show ${number(all.length - shown.length)} more`;
    const known = this.rows;
    this.rows = new Map();
    shown.forEach((row, i) => {
      const words = tellRow(row, this.whose);
      const bars = spans(row.nodes);
      const drawn = [total, i - (row.above ?? i), words.title, words.more, ...bars.map(({ tier, end }) => tier + end)].join();
      const before = known.get(row.key);
      const node = before?.drawn === drawn ? before.node : drawRow(row, i, total, words, bars);
      this.rows.set(row.key, { drawn, node });
      if (this.list.children[i] !== node) this.list.insertBefore(node, this.list.children[i] ?? null);
    });
    while (this.list.children.length > shown.length) this.list.lastChild.remove();
  }
}

function drawRow(row, i, total, words, bars) {
  const left = `${(100 * row.begin) / total}%`;
  const track = make("div", { className: "track" });
  if (row.above !== null) {
    const up = Math.min(i - row.above, MAX_UP_ROWS) * ROW_PX - ROW_PX / 2;
    track.append(make("i", { style: { left, height: `${up + 4}px`, top: `${ROW_PX / 2 - up}px` } }));
  }
  for (const { tier, begin, end } of bars) {
    const style = { left: `${(100 * begin) / total}%`, width: `max(3px, ${(100 * (end - begin)) / total}%)` };
    track.append(make("span", { className: tier, style }));
  }
  const text = make("div", { className: "words" }, make("b", { textContent: words.title }), make("span", { textContent: words.more }));
  return make("li", { title: `${words.title}: ${words.more}` }, track, text);
}

/** Neighbours in the same tiers as one span. */
function spans(nodes) {
  const found = [];
  for (const node of nodes) {
    const tier = "memory" in node.num_bytes ? ("disk" in node.num_bytes ? "both" : "memory") : "disk";
    const last = found.at(-1);
    if (last?.tier === tier) last.end = node.end;
    else found.push({ tier, begin: node.begin, end: node.end });
  }
  return found;
}

function tellRow({ nodes, begin, end, labels }, whose) {
  const bytes = {};
  for (const { num_bytes: each } of nodes) {
    for (const [tier, count] of Object.entries(each)) bytes[tier] = (bytes[tier] ?? 0) + count;
  }
  const hits = Math.max(...nodes.map((node) => node.hits));
  const idle = Math.min(...nodes.map((node) => node.idle_s));
  const more = [
    hits ? `used ${number(hits)}×` : "not used yet",
    idle < 60 ? "just now" : `${duration(Math.floor(idle / 60) * 60_000)} ago`,
    `tokens ${number(begin)} to ${number(end)}`,
    Object.values(bytes).map(size).join(" + "),
    `${nodes.length} node${nodes.length === 1 ? "" : "s"}`,
  ];
  return { title: whose(labels), more: more.join(" · ") };
}
