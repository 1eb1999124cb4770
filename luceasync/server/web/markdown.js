// Markdown as DOM nodes: parsed by markdown-it, coloured by highlight.js, cleaned by DOMPurify.
// HTML in a text stays text; nothing is loaded from elsewhere: images are links.

import { morph } from "./morph.js";
import { drawMath, mathRules } from "./math.js";
import DOMPurify from "./vendor/dompurify-3.4.18.js";
import highlighter from "./vendor/highlight-11.12.0.js";
import footnotes from "./vendor/markdown-it-footnote-4.0.0.js";
import MarkdownIt from "./vendor/markdown-it-15.0.3.js";

const MAX_COLOURED_CHARS = 40_000; // of a code block
const MAX_COLOURED_BLOCKS = 300; // that are remembered
const TASK = /^\[([ xX])\]\s+/;
const INLINE_HTML = /^<(br\s*\/?|\/?(?:sub|sup|kbd))>/i; // what models write amid Markdown
const CLEAN = {
  ALLOWED_TAGS: [
    "a", "blockquote", "br", "button", "code", "del", "div", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "input", "kbd",
    "li", "ol", "p", "pre", "s", "section", "span", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead", "tr", "ul",
  ],
  ALLOWED_ATTR: [
    "aria-label", "checked", "class", "data-act", "data-display", "data-whole", "disabled", "href", "id", "rel", "role",
    "start", "tabindex", "target", "title", "type",
  ],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:|#)/i,
  ADD_URI_SAFE_ATTR: [ // all but href
    "aria-label", "checked", "data-act", "data-display", "data-whole", "disabled", "rel", "start", "tabindex", "target", "type",
  ],
  ALLOW_DATA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

const coloured = new Map(); // HTML by language and code: an answer that grows is parsed again and again
const parser = new MarkdownIt({ html: false, linkify: true, breaks: true }).use(footnotes).use(mathRules).use(ownRules);

/** A place that shows a text, and only draws what a new text changes. */
export class MarkdownView {
  /** @param {HTMLElement} place
   * @param {string} name unique in the page: footnotes are linked by it */
  constructor(place, name) {
    this.place = place;
    this.name = name;
    this.text = null;
    this.blocks = []; // the HTML of each
  }

  /** Show `text`, whose end may still be missing. */
  update(text) {
    if (text === this.text) return;
    this.text = text;
    const blocks = rendered(text, this.name);
    blocks.forEach((html, i) => {
      if (this.blocks[i] === html) return;
      const node = this.place.children[i] ?? this.place.appendChild(document.createElement("div"));
      const clean = DOMPurify.sanitize(html, CLEAN);
      drawMath(clean);
      morph(node, clean);
    });
    while (this.place.children.length > blocks.length) this.place.lastChild.remove();
    this.blocks = blocks;
  }
}

/** @returns {string[]} the HTML of each block of the text that is in no other. */
function rendered(text, name) {
  const environment = { docId: name };
  const tokens = parser.parse(text, environment);
  const blocks = [];
  let begin = 0;
  let depth = 0;
  tokens.forEach((token, i) => {
    depth += token.nesting;
    if (depth > 0) return;
    blocks.push(parser.renderer.render(tokens.slice(begin, i + 1), parser.options, environment));
    begin = i + 1;
  });
  return blocks;
}

function ownRules(md) {
  const { rules } = md.renderer;
  rules.fence = (tokens, i) => codeBlock(tokens[i].content, tokens[i].info.trim().split(/\s+/)[0]);
  rules.code_block = (tokens, i) => codeBlock(tokens[i].content, "");
  rules.image = (tokens, i) => imageLink(md, tokens[i]);
  rules.link_open = (tokens, i, options, environment, self) => {
    tokens[i].attrSet("rel", "noreferrer noopener");
    tokens[i].attrSet("target", "_blank");
    return self.renderToken(tokens, i, options);
  };
  rules.table_open = () => '<div class="table" tabindex="0" role="region" aria-label="Table"><table>';
  rules.table_close = () => "</table></div>";
  for (const cell of ["th_open", "td_open"]) rules[cell] = alignedCell;
  rules.heading_open = (tokens, i) => `<h${heading(tokens[i])}>`;
  rules.heading_close = (tokens, i) => `</h${heading(tokens[i])}>`;
  rules.task = (tokens, i) => {
    const isDone = tokens[i].meta;
    return `<input type="checkbox" disabled aria-label="${isDone ? "done" : "not done"}"${isDone ? " checked" : ""}> `;
  };
  md.core.ruler.after("inline", "tasks", markTasks);
  md.inline.ruler.before("autolink", "inline_html", inlineHtml);
}

// The page itself has headings of the first and second level.
const heading = (token) => Math.min(6, Number(token.tag.slice(1)) + 2);

// The alignment as a class: the page's policy forbids the attribute "style".
function alignedCell(tokens, i, options, environment, self) {
  const found = /text-align:(\w+)/.exec(tokens[i].attrGet("style") ?? "");
  tokens[i].attrs = found ? [["class", `to-${found[1]}`]] : null;
  return self.renderToken(tokens, i, options);
}

function codeBlock(text, language) {
  const code = text.replace(/\n$/, "");
  const isKnown = language && highlighter.getLanguage(language) && code.length <= MAX_COLOURED_CHARS;
  const html = isKnown ? colours(code, language) : escaped(code);
  const told = `<span>${escaped(language || "text")}</span>`;
  const copy = '<button type="button" data-act="copy-code">Copy</button>';
  return `<div class="code"><div>${told}${copy}</div><pre tabindex="0"><code>${html}</code></pre></div>`;
}

function colours(code, language) {
  const key = `${language}\n${code}`;
  if (!coloured.has(key)) {
    if (coloured.size >= MAX_COLOURED_BLOCKS) coloured.delete(coloured.keys().next().value);
    coloured.set(key, highlighter.highlight(code, { language, ignoreIllegals: true }).value);
  }
  return coloured.get(key);
}

function imageLink(md, token) {
  const href = token.attrGet("src") ?? "";
  const words = escaped(token.content || href);
  if (!/^https?:/i.test(href)) return words;
  return `<a href="${escaped(href)}" rel="noreferrer noopener" target="_blank">${words} (image)</a>`;
}

function markTasks(state) {
  state.tokens.forEach((token, i) => {
    if (token.type !== "inline" || state.tokens[i - 2]?.type !== "list_item_open") return;
    const first = token.children[0];
    const found = first?.type === "text" && TASK.exec(first.content);
    if (!found) return;
    first.content = first.content.slice(found[0].length);
    const task = new state.Token("task", "", 0);
    task.meta = found[1] !== " ";
    token.children.unshift(task);
    state.tokens[i - 2].attrJoin("class", "task");
  });
}

function inlineHtml(state, silent) {
  const found = INLINE_HTML.exec(state.src.slice(state.pos, state.pos + 8));
  if (!found) return false;
  if (!silent) state.push("html_inline", "", 0).content = found[0].toLowerCase();
  state.pos += found[0].length;
  return true;
}

function escaped(text) {
  return text.replace(/[&<>"]/g, (letter) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[letter]);
}
