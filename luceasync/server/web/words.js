// What people read about numbers: sizes, times, and why an answer took as long as it did. Pure.

export function size(bytes) {
  if (bytes < 2 ** 10) return `${bytes} bytes`;
  if (bytes < 2 ** 20) return `${(bytes / 2 ** 10).toFixed(0)} KiB`;
  return bytes < 2 ** 30 ? `${(bytes / 2 ** 20).toFixed(bytes < 10 * 2 ** 20 ? 1 : 0)} MiB` : `${(bytes / 2 ** 30).toFixed(1)} GiB`;
}

export function duration(ms) {
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 120_000) return `${(ms / 1000).toFixed(ms < 10_000 ? 1 : 0)} s`;
  return ms < 7_200_000 ? `${Math.round(ms / 60_000)} min` : `${Math.round(ms / 3_600_000)} h`;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const number = (value) => whole.format(value);

export const tokens = (count) => `${number(count)} token${Math.round(count) === 1 ? "" : "s"}`;

export const rate = (value) => (value >= 100 ? number(value) : value.toFixed(1));

export function parameters(count) {
  if (count >= 1e9) return `${(count / 1e9).toFixed(count < 1e10 ? 1 : 0)}B parameters`;
  return `${Math.round(count / 1e6)}M parameters`;
}

/** Why nothing, or no more, was restored, by the server's `miss_reason`. */
export const MISSED = {
  empty: "nothing has been kept yet",
  no_common_prefix: "nothing that is kept begins like this prompt",
  too_short: "what is kept shares fewer than 64 tokens with it",
  no_state: "no recurrent state was kept where the prompts part",
  no_memory: "there was no memory to keep more, or to take it up",
  prefill_is_faster: "computing it again was expected to be faster than reading it",
  run_whole: "the request asked for probabilities of the whole prompt",
  corrupt: "a file was damaged; it was put aside",
  gone: "another process had removed the file",
  io_error: "the disk could not be read, or was too slow",
};

/** Why what was found was used or not, by the server's `decision`. */
const DECIDED = {
  restore_is_faster: "reading it was expected to be faster than computing it",
  trial: "earlier reads were slow, so this one was a trial",
  not_measured: "the disk's speed was not known yet",
};

const TIERS = { memory: "memory", disk: "the disk" };

/**
 * How long each part of an answer took, in ms, in their order.
 * @returns {{name: string, words: string, ms: number}[]}
 */
export function parts({ timings, luceasync }) {
  return [
    { name: "queue", words: "waiting for a lane", ms: timings.queued_ms },
    { name: "restore", words: "taking up what was kept", ms: luceasync.restore_ms },
    { name: "prefill", words: "reading the prompt", ms: timings.prompt_ms },
    { name: "decode", words: "writing the answer", ms: timings.predicted_ms },
  ];
}

/**
 * What made an answer as fast or slow as it was, as sentences.
 * @param {{prompt: number, cached: number, written: number, timings: object, luceasync: object}} answer
 * @returns {string[]}
 */
export function explained({ prompt, cached, written, timings, luceasync }) {
  const { tier, restore_ms: restoreMs, decision, miss_reason: missed, speculation, kvflash } = luceasync;
  const said = [];
  const slowest = parts({ timings, luceasync }).reduce((one, other) => (other.ms > one.ms ? other : one));
  const sum = parts({ timings, luceasync }).reduce((all, { ms }) => all + ms, 0);
  if (sum > 0) said.push(`${Math.round((100 * slowest.ms) / sum)} % of the time went into ${slowest.words}.`);
  if (timings.queued_ms >= 50) said.push(`It waited ${duration(timings.queued_ms)} until it got a lane.`);
  if (cached) {
    const from = TIERS[tier] ? ` from ${TIERS[tier]} in ${duration(restoreMs)}` : "";
    const why = tier === "disk" && DECIDED[decision] ? `: ${DECIDED[decision]}` : "";
    said.push(`${number(cached)} of ${tokens(prompt)} of the prompt were taken up${from}${why}.`);
  }
  if (missed) said.push(`${cached ? "No more was" : "Nothing of the prompt was"} taken up: ${MISSED[missed] ?? missed}.`);
  if (timings.prompt_n) {
    const pace = timings.prompt_per_second ? `, ${rate(timings.prompt_per_second)} tokens/s` : "";
    said.push(`${tokens(timings.prompt_n)} of the prompt were computed in ${duration(timings.prompt_ms)}${pace}.`);
  }
  if (timings.predicted_n) {
    said.push(`${tokens(written)} were written at ${rate(timings.predicted_per_second)} tokens/s.`);
  }
  if (speculation?.rounds) {
    const { accepted, proposed, tau } = speculation;
    said.push(`The draft was right about ${number(accepted)} of ${number(proposed)} tokens: ${tau.toFixed(1)} tokens a step.`);
  }
  if (speculation?.off_reason) said.push(`Speculation was off: ${speculation.off_reason}.`);
  if (kvflash?.absent) said.push(`${tokens(kvflash.absent)} of the context were not on the devices; ${number(kvflash.recalled)} chunks were brought back.`);
  return said;
}

/** What a lane's prompt went on from, while it runs. */
export function laneStory({ cached_tokens: cached, tier, miss_reason: missed }) {
  if (cached) return `${tokens(cached)} taken up${TIERS[tier] ? ` from ${TIERS[tier]}` : ""}${missed ? `; no more: ${MISSED[missed] ?? missed}` : ""}`;
  return missed ? `nothing taken up: ${MISSED[missed] ?? missed}` : "";
}

/** The CRC-32 of a conversation's name, by which the server labels it. */
export function labelOf(word) {
  let sum = -1;
  for (const byte of new TextEncoder().encode(word)) {
    sum ^= byte;
    for (let bit = 0; bit < 8; bit += 1) sum = (sum >>> 1) ^ (sum & 1 ? 0xedb88320 : 0);
  }
  return (~sum >>> 0).toString(16).padStart(8, "0");
}
