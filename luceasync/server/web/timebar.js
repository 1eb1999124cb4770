// A bar of what an answer's time went into.

import { make } from "./dom.js";
import { duration, parts } from "./words.js";

/** @returns {HTMLElement} the parts of `{timings, luceasync}` to scale, with their times. */
export function timeBar(answer) {
  const all = parts(answer).filter(({ ms }) => ms >= 0.5);
  const sum = all.reduce((ms, each) => ms + each.ms, 0) || 1;
  const bar = make("div", { className: "bar" });
  const legend = make("ul", { className: "legend" });
  for (const { name, words, ms } of all) {
    bar.append(make("span", { className: name, style: { width: `${(100 * ms) / sum}%` } }));
    legend.append(make("li", { className: name, textContent: `${words} ${duration(ms)}` }));
  }
  return make("div", { className: "time-bar" }, bar, legend);
}
