// Charts of a series over the last minutes, drawn by uPlot.

import "./locale.js";
import { make } from "./dom.js";
import { number, rate } from "./words.js";
import Plot from "./vendor/uplot-1.6.32.js";

const SHOWN_S = 180;
const HEIGHT_PX = 104;
const percent = (value) => `${Math.round(100 * value)} %`;

/** What is drawn: fields of a Point, their words and colours. */
const CHARTS = [
  { title: "Writing, tokens/s", format: rate, lines: [["decode", "", "--chart-1"]] },
  { title: "Reading prompts, tokens/s", format: rate, lines: [["prefill", "", "--chart-2"]] },
  { title: "Requests", format: number, lines: [["running", "running", "--chart-1"], ["queue", "waiting", "--chart-3"]] },
  { title: "Prompt and draft tokens", format: percent, max: 1, lines: [["cached", "cached", "--chart-2"], ["accepted", "accepted", "--chart-4"]] },
];

export class Charts {
  /** @param {HTMLElement} place
   * @param {import("./series.js").Series} series */
  constructor(place, series) {
    this.place = place;
    this.series = series;
    this.charts = [];
    this.redraw = () => { if (place.isConnected && place.offsetWidth) this.draw(); };
    new ResizeObserver(() => this.resize()).observe(place);
    addEventListener("themechange", this.redraw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", this.redraw);
  }

  /** Show the series as it is now. */
  update() {
    if (!this.charts.length) this.draw();
    for (const chart of this.charts) chart.update(this.series);
  }

  draw() {
    for (const chart of this.charts) chart.plot.destroy();
    this.place.replaceChildren();
    this.charts = CHARTS.map((told) => new Chart(this.place, told));
    for (const chart of this.charts) chart.update(this.series);
  }

  resize() {
    for (const { plot, figure } of this.charts) {
      const width = innerWidth(figure);
      if (width > 0 && width !== plot.width) plot.setSize({ width, height: HEIGHT_PX });
    }
  }
}

class Chart {
  constructor(place, { title, format, lines, max }) {
    this.names = lines.map(([name]) => name);
    this.format = format;
    this.values = lines.map(([, words, colour]) => ({ words, node: make("b"), colour }));
    const told = this.values.map(({ words, node, colour }) => (
      make("span", { style: { "--dot": `var(${colour})` }, className: "dot" }, node, words ? ` ${words}` : "")
    ));
    this.caption = make("figcaption", {}, make("span", { textContent: title }), ...told);
    this.figure = make("figure", {}, this.caption);
    place.append(this.figure);
    const colours = coloursIn(this.figure);
    const axis = { stroke: colours("--faint"), font: "11px system-ui", ticks: { show: false }, grid: { stroke: colours("--line"), width: 1 } };
    this.plot = new Plot({
      width: Math.max(100, innerWidth(this.figure)),
      height: HEIGHT_PX,
      padding: [8, 6, 0, 0],
      legend: { show: false },
      cursor: { y: false, points: { show: false }, drag: { x: false, y: false }, sync: { key: "live" } },
      scales: { x: { time: false, range: [-SHOWN_S, 0] }, y: { range: (_, low, high) => [0, max ?? niceEnd(high)] } },
      axes: [
        { ...axis, size: 20, gap: 2, values: (_, splits) => splits.map((s) => (s === -SHOWN_S ? "" : s ? `${s / 60} min` : "")), incrs: [60] },
        { ...axis, size: 44, gap: 4, space: 28, values: (_, splits) => splits.map((value) => short(value, max)) },
      ],
      series: [{}, ...lines.map(([, , colour], i) => ({
        stroke: colours(colour), width: 1.5, points: { show: false }, spanGaps: false,
        ...(i || lines.length > 1 ? {} : { fill: `color-mix(in srgb, ${colours(colour)} 18%, transparent)` }),
      }))],
      hooks: { setCursor: [() => this.tell()] },
    }, [[], ...lines.map(() => [])], this.figure);
    this.plot.root.setAttribute("aria-hidden", "true"); // the caption has the figures
  }

  update(series) {
    this.plot.setData(series.columns(this.names, SHOWN_S));
    this.tell();
  }

  /** Tell the values at the cursor, or the newest ones. */
  tell() {
    const { data, cursor } = this.plot;
    this.values.forEach(({ node }, i) => {
      const column = data[i + 1] ?? [];
      const value = cursor.idx === null || cursor.idx === undefined ? column.at(-1) : column[cursor.idx];
      node.textContent = value === null || value === undefined ? "–" : this.format(value);
    });
  }
}

// Without the padding.
function innerWidth(figure) {
  const { paddingLeft, paddingRight } = getComputedStyle(figure);
  return Math.floor(figure.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight));
}

function niceEnd(high) {
  const step = 10 ** Math.floor(Math.log10(Math.max(1, high)));
  return Math.max(1, Math.ceil((high ?? 0) / step) * step);
}

function short(value, max) {
  if (max === 1) return `${Math.round(100 * value)} %`;
  return value >= 1000 ? `${(value / 1000).toFixed(value % 1000 ? 1 : 0)}k` : String(value);
}

// Custom properties of the style sheet as colours that a canvas understands.
function coloursIn(place) {
  const probe = place.appendChild(make("span"));
  const found = (name) => {
    probe.style.color = `var(${name})`;
    return getComputedStyle(probe).color;
  };
  queueMicrotask(() => probe.remove());
  return found;
}
