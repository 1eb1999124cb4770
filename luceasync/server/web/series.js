// What the server did over the last minutes, from the totals of its statuses. Pure.

const KEPT_S = 600;
const SHARE_S = 20; // of which shares are taken: totals of the cache move when answers end

/** @typedef {{time: number, decode: number | null, prefill: number | null, running: number, queue: number,
 *   cached: number | null, accepted: number | null}} Point of one status: per second, or shares from 0 to 1 */

export class Series {
  constructor() {
    this.totals = []; // of each status
    /** @type {Point[]} */
    this.points = [];
  }

  /** Take a status that came at `nowMs`. */
  add(status, nowMs) {
    const now = { time: nowMs / 1000, ...totalsOf(status) };
    const last = this.totals.at(-1);
    if (last && now.time - last.time < 0.2) return;
    this.totals.push(now);
    const isRestarted = last && (now.decode < last.decode || now.prefill < last.prefill);
    const perSecond = (name) => (last && !isRestarted ? (now[name] - last[name]) / (now.time - last.time) : null);
    const since = this.totals.find(({ time }) => time >= now.time - SHARE_S);
    const grown = (name) => Math.max(0, now[name] - since[name]);
    this.points.push({
      time: now.time,
      decode: perSecond("decode"),
      prefill: perSecond("prefill"),
      running: status.num_running,
      queue: status.num_queued,
      cached: share(grown("restored"), grown("prefill")),
      accepted: share(grown("accepted"), grown("proposed") - grown("accepted")),
    });
    while (now.time - this.points[0].time > KEPT_S) {
      this.points.shift();
      this.totals.shift();
    }
  }

  /** @returns {(number | null)[][]} a column for each name, from the last `seconds`. */
  columns(names, seconds) {
    const end = this.points.at(-1)?.time ?? 0;
    const recent = this.points.filter(({ time }) => time >= end - seconds);
    return [recent.map(({ time }) => time - end), ...names.map((name) => recent.map((point) => point[name]))];
  }
}

function totalsOf({ prefilled_tokens_total: prefill, decoded_tokens_total: decode, cache, speculation }) {
  const restored = Object.values(cache?.restored_tokens_total ?? {}).reduce((sum, each) => sum + each, 0);
  return { prefill, decode, restored, proposed: speculation?.proposed_total ?? 0, accepted: speculation?.accepted_total ?? 0 };
}

const share = (part, rest) => (part + rest > 0 ? part / (part + rest) : null);
