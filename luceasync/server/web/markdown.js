// Renders Markdown as DOM nodes. Everything else stays text; HTML is never parsed.

const FENCE = /^(\s*)(`{3,}|~{3,})\s*(\S*).*$/;
const HEADING = /^(#{1,6})\s+(.*)$/;
const BULLET = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^>\s?(.*)$/;
const RULE = /^(-{3,}|\*{3,}|_{3,})\s*$/;
const TABLE_LINE = /^\s*\|?[\s:|-]+\|[\s:|-]*$/;
const INLINE = /(`+)([\s\S]*?[^`])\1(?!`)|\*\*(?=\S)([\s\S]*?\S)\*\*|\*(?=\S)([^*\n]*?\S)\*|~~(?=\S)([\s\S]*?\S)~~|\[([^\]\n]+)\]\(([^\s()]+)\)|(https?:\/\/[^\s<>()]+)/;
const MAX_DEPTH = 8; // of nested lists and quotes

export function render(text) {
  const whole = document.createDocumentFragment();
  blocks(text.replace(/\r\n?/g, "\n").split("\n"), whole, 0);
  return whole;
}

function blocks(lines, parent, depth) {
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) { at += 1; }
    else if (FENCE.test(line)) { at = fence(lines, at, parent); }
    else if (HEADING.test(line)) {
      const [, marks, title] = HEADING.exec(line);
      const heading = add(parent, `h${Math.min(6, marks.length + 2)}`);
      inline(title, heading);
      at += 1;
    }
    else if (RULE.test(line)) { add(parent, "hr"); at += 1; }
    else if (depth < MAX_DEPTH && QUOTE.test(line)) {
      const end = until(lines, at, (each) => !QUOTE.test(each));
      blocks(lines.slice(at, end).map((each) => QUOTE.exec(each)[1]), add(parent, "blockquote"), depth + 1);
      at = end;
    }
    else if (depth < MAX_DEPTH && BULLET.test(line)) { at = list(lines, at, parent, depth); }
    else if (line.includes("|") && TABLE_LINE.test(lines[at + 1] ?? "")) { at = table(lines, at, parent); }
    else {
      const end = Math.max(at + 1, until(lines, at + 1, begins));
      inline(lines.slice(at, end).join("\n"), add(parent, "p"));
      at = end;
    }
  }
}

function begins(line) {
  return !line.trim() || FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || BULLET.test(line) || RULE.test(line);
}

function until(lines, at, ends) {
  const found = lines.findIndex((line, i) => i >= at && ends(line));
  return found < 0 ? lines.length : found;
}

function fence(lines, at, parent) {
  const [, indent, marks, language] = FENCE.exec(lines[at]);
  const end = until(lines, at + 1, (line) => line.trim().startsWith(marks) && !line.trim().slice(marks.length).trim());
  const code = add(add(parent, "pre"), "code");
  code.parentNode.tabIndex = 0; // it may scroll
  if (language) code.dataset.language = language;
  code.textContent = lines.slice(at + 1, end).map((line) => line.startsWith(indent) ? line.slice(indent.length) : line).join("\n");
  return end + 1;
}

function list(lines, at, parent, depth) {
  const [, indent, mark] = BULLET.exec(lines[at]);
  const isOrdered = /\d/.test(mark);
  const node = add(parent, isOrdered ? "ol" : "ul");
  if (isOrdered) node.start = parseInt(mark, 10);
  while (at < lines.length) {
    const bullet = BULLET.exec(lines[at]);
    if (!bullet || bullet[1].length !== indent.length || /\d/.test(bullet[2]) !== isOrdered) break;
    const inner = bullet[1].length + bullet[2].length + 1;
    const end = until(lines, at + 1, (line) => line.trim() !== "" && line.search(/\S/) < Math.min(inner, indent.length + 2));
    const own = lines.slice(at + 1, end).map((line) => line.slice(Math.min(inner, Math.max(0, line.search(/\S/)))));
    blocks([bullet[3], ...own], add(node, "li"), depth + 1);
    at = end;
  }
  return at;
}

function table(lines, at, parent) {
  const end = until(lines, at, (line) => !line.includes("|"));
  const node = add(parent, "table");
  lines.slice(at, end).forEach((line, i) => {
    if (i === 1) return;
    const row = add(node, "tr");
    for (const cell of line.trim().replace(/^\||\|$/g, "").split("|")) inline(cell.trim(), add(row, i ? "td" : "th"));
  });
  return end;
}

function inline(text, parent) {
  let rest = text;
  for (let found = INLINE.exec(rest); found; found = INLINE.exec(rest)) {
    parent.append(rest.slice(0, found.index));
    const [all, , code, strong, emphasis, struck, label, href, bare] = found;
    if (code !== undefined) add(parent, "code").textContent = code;
    else if (strong !== undefined) inline(strong, add(parent, "strong"));
    else if (emphasis !== undefined) inline(emphasis, add(parent, "em"));
    else if (struck !== undefined) inline(struck, add(parent, "del"));
    else link(parent, label ?? bare, href ?? bare);
    rest = rest.slice(found.index + all.length);
  }
  parent.append(rest);
}

function link(parent, label, href) {
  if (!/^(https?:|mailto:)/i.test(href)) { parent.append(label); return; }
  const node = add(parent, "a");
  node.href = href;
  node.rel = "noreferrer noopener";
  node.target = "_blank";
  node.textContent = label;
}

function add(parent, name) {
  return parent.appendChild(document.createElement(name));
}
