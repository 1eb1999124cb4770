// Formulas: rules that find them in Markdown, and KaTeX, loaded when the first one is drawn.

const TYPESETTER = "./vendor/katex-0.19.1/katex.js";
const STYLE = "web/vendor/katex-0.19.1/katex.css";
const OPTIONS = { trust: false, strict: false, throwOnError: true, maxExpand: 500, maxSize: 20 };
const PAIRS = [["$$", "$$", true], ["\\[", "\\]", true], ["\\(", "\\)", false], ["$", "$", false]];

let loading = null; // the promise of KaTeX

/** A plugin of markdown-it: $x$, \(x\), $$x$$ and \[x\]; a formula keeps its source as text. */
export function mathRules(md) {
  md.inline.ruler.before("escape", "math", inlineMath);
  md.block.ruler.before("fence", "math", blockMath, { alt: ["paragraph", "reference", "blockquote", "list"] });
  const html = (tag) => (tokens, i) => {
    const { content, markup } = tokens[i];
    const source = md.utils.escapeHtml(content);
    return `<${tag} class="math" data-whole="${source}"${markup ? ' data-display="1"' : ""}>${source}</${tag}>`;
  };
  md.renderer.rules.math = html("span");
  md.renderer.rules.math_block = html("div");
}

function inlineMath(state, silent) {
  const { src, pos } = state;
  const pair = PAIRS.find(([open]) => src.startsWith(open, pos));
  if (!pair) return false;
  const [open, close, isDisplay] = pair;
  const begin = pos + open.length;
  const end = src.indexOf(close, begin);
  if (end <= begin || (open === "$" && !isFormula(src, begin, end))) return false;
  if (!silent) push(state, "math", src.slice(begin, end), isDisplay);
  state.pos = end + close.length;
  return true;
}

// Between single dollars, money is likelier than a formula unless both stand close to it.
function isFormula(src, begin, end) {
  const inner = src.slice(begin, end);
  return !/^\s|\s$|\n/.test(inner) && !/\d/.test(src[end + 1] ?? "") && src[end - 1] !== "\\";
}

function blockMath(state, beginLine, endLine, silent) {
  const from = state.bMarks[beginLine] + state.tShift[beginLine];
  const pair = PAIRS.slice(0, 2).find(([open]) => state.src.startsWith(open, from));
  if (!pair || state.sCount[beginLine] - state.blkIndent >= 4) return false;
  const [open, close] = pair;
  for (let line = beginLine; line < endLine; line += 1) {
    const start = line === beginLine ? from + open.length : state.bMarks[line];
    const text = state.src.slice(start, state.eMarks[line]).trimEnd();
    if (!text.endsWith(close) || (line === beginLine && !text.slice(0, -close.length).trim())) continue;
    if (silent) return true;
    const end = state.src.lastIndexOf(close, state.eMarks[line]);
    const token = push(state, "math_block", state.src.slice(from + open.length, end), true);
    token.block = true;
    token.map = [beginLine, line + 1];
    state.line = line + 1;
    return true;
  }
  return false;
}

function push(state, type, source, isDisplay) {
  const token = state.push(type, "", 0);
  token.content = source.trim();
  token.markup = isDisplay ? "display" : "";
  return token;
}

/** Draw the formulas below `root`, at once if KaTeX is there. */
export function drawMath(root) {
  const places = [...root.querySelectorAll(".math")];
  if (!places.length) return;
  if (globalThis.katex) places.forEach(draw);
  else load();
}

function draw(place) {
  const { whole, display } = place.dataset;
  if (place.classList.contains("drawn")) return;
  place.classList.add("drawn");
  try {
    const drawn = document.createElement("span");
    globalThis.katex.render(whole, drawn, { ...OPTIONS, displayMode: Boolean(display) });
    place.replaceChildren(drawn);
  } catch {
    place.classList.add("unknown"); // its source stays
  }
}

function load() {
  loading ??= (async () => {
    const style = Object.assign(document.createElement("link"), { rel: "stylesheet", href: STYLE });
    document.head.append(style);
    await import(TYPESETTER);
    drawMath(document);
  })();
}
