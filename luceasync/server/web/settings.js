// Settings of all conversations: sampling, thinking, theme, prompt presets; kept in the browser.

/**
 * What the page offers of sampling. `standard` null: the request leaves the field out.
 * @type {{name: string, label: string, standard: number | null, min: number, max?: number, step: number, help: string}[]}
 */
export const SAMPLING = [
  { name: "temperature", label: "Temperature", standard: 0.7, min: 0, max: 2, step: 0.1, help: "0 always takes the likeliest token" },
  { name: "top_p", label: "Top p", standard: 1, min: 0.01, max: 1, step: 0.01, help: "The likeliest tokens that together have this probability" },
  { name: "top_k", label: "Top k", standard: 0, min: 0, step: 1, help: "So many of the likeliest tokens; 0: all" },
  { name: "min_p", label: "Min p", standard: 0, min: 0, max: 1, step: 0.01, help: "Tokens at least this likely, compared with the likeliest" },
  { name: "repetition_penalty", label: "Repetition penalty", standard: 1, min: 0.1, max: 2, step: 0.05, help: "Above 1: against tokens that have occurred" },
  { name: "frequency_penalty", label: "Frequency penalty", standard: 0, min: -2, max: 2, step: 0.1, help: "Grows with each occurrence" },
  { name: "presence_penalty", label: "Presence penalty", standard: 0, min: -2, max: 2, step: 0.1, help: "The same for each token that has occurred" },
  { name: "seed", label: "Seed", standard: null, min: 0, step: 1, help: "The same seed draws the same answer; none: another each time" },
  { name: "max_tokens", label: "Most tokens of an answer", standard: null, min: 1, step: 1, help: "None: as many as fit the context" },
];

const PRESETS = [
  { name: "Concise", text: "Answer in as few words as the question allows. No preamble, no summary." },
  { name: "Programmer", text: "You are an experienced programmer. Show working code first, then explain only what is not obvious." },
  { name: "Proofreader", text: "Correct spelling and grammar of the text that you are given. Keep its tone. List what you changed." },
  { name: "Translator", text: "Translate what you are given into English, or into the language that is named. Give only the translation." },
];
const DEFAULTS = { system: "", sampling: {}, stop: "", thinking: true, showsThinking: false, theme: "system", presets: PRESETS };

export class Settings {
  /** @param {import("./store.js").Store} store */
  constructor(store) {
    this.store = store;
    const { temperature, maxTokens, ...kept } = store.settings; // the first two: of earlier versions
    const sampling = {
      ...(typeof temperature === "number" && temperature !== 0.7 ? { temperature } : {}),
      ...(maxTokens ? { max_tokens: Number(maxTokens) } : {}),
    };
    this.values = { ...DEFAULTS, sampling, ...kept };
  }

  /** Set fields, and keep them. */
  set(changes) {
    Object.assign(this.values, changes);
    this.store.settings = this.values;
  }

  /** Set a field of sampling; null: its default. */
  setSampling(name, value) {
    const { [name]: _, ...others } = this.values.sampling;
    this.set({ sampling: value === null ? others : { ...others, [name]: value } });
  }

  /** @returns {object} the fields of a request. `thinks`: whether the model can. */
  request(thinks) {
    const set = SAMPLING.map(({ name, standard }) => [name, this.values.sampling[name] ?? (name === "temperature" ? standard : null)]);
    const stop = this.values.stop.split("\n").filter(Boolean);
    return {
      ...Object.fromEntries(set.filter(([, value]) => value !== null)),
      ...(stop.length ? { stop } : {}),
      ...(thinks ? { enable_thinking: this.values.thinking } : {}),
    };
  }

  /** Keep a system prompt under a name. */
  savePreset(name, text) {
    this.set({ presets: [...this.values.presets.filter((each) => each.name !== name), { name, text }] });
  }

  removePreset(name) {
    this.set({ presets: this.values.presets.filter((each) => each.name !== name) });
  }
}

/** Draw the page in this theme: light, dark or the system's. */
export function applyTheme(theme) {
  const { dataset } = document.documentElement;
  if (theme === "light" || theme === "dark") dataset.theme = theme;
  else delete dataset.theme;
  dispatchEvent(new Event("themechange"));
}
