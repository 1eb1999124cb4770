// Conversations as files: JSON keeps everything, Markdown the branch that is shown. Pure.

import { append, create, newId, path, upgraded, wholeText } from "./conversation.js";

const FORMAT = "luceasync-conversations";
const HEADING = /^## (You|Model)$/;

/** @returns {string} */
export function toJson(conversations) {
  return JSON.stringify({ format: FORMAT, version: 1, conversations }, null, 1);
}

/** @returns {string} a heading for each message; lines like these headings get a backslash. */
export function toMarkdown(conversation) {
  const parts = [`# ${conversation.title || "Conversation"}`];
  if (conversation.system) parts.push("## System", guarded(conversation.system));
  for (const message of path(conversation)) {
    parts.push(`## ${message.role === "user" ? "You" : "Model"}`, guarded(wholeText(message)));
  }
  return `${parts.join("\n\n")}\n`;
}

const guarded = (text) => text.replace(/^(\\*)(?=## (?:You|Model|System)$)/gm, "$1\\");
const unguarded = (text) => text.replace(/^\\(\\*)(?=## (?:You|Model|System)$)/gm, "$1");

/**
 * Conversations of a file, JSON or Markdown, under new ids.
 * @returns {import("./conversation.js").Conversation[]}
 * @throws {Error} if the file has none.
 */
export function fromFile(name, text) {
  const found = /\.(md|markdown)$/i.test(name) ? [fromMarkdown(text)] : fromJson(text);
  const whole = found.map(upgraded).filter(Boolean);
  if (!whole.length) throw new Error(`${name} has no conversations that this page has exported.`);
  return whole.map((each) => ({ ...each, id: newId(), savedAt: Date.now() }));
}

function fromJson(text) {
  try {
    const kept = JSON.parse(text);
    return Array.isArray(kept) ? kept : kept.conversations ?? [kept];
  } catch {
    return [];
  }
}

function fromMarkdown(text) {
  const made = create();
  let role = null;
  let lines = [];
  const end = () => {
    const said = unguarded(lines.join("\n").trim());
    if (role === "system") made.system = said;
    else if (role) append(made, made.head, { role, content: said });
    lines = [];
  };
  for (const line of text.replace(/\r\n?/g, "\n").split("\n")) {
    const found = HEADING.exec(line);
    if (!role && !made.title && line.startsWith("# ")) made.title = line.slice(2).trim();
    else if (line === "## System" && !role) role = "system";
    else if (found) {
      end();
      role = found[1] === "You" ? "user" : "assistant";
    } else lines.push(line);
  }
  end();
  return made;
}

/** Let the browser save `text` as a file. */
export function download(name, type, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name.replace(/[^\w .-]+/g, "_").slice(0, 80);
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
