// Files that the user attaches, drops or pastes: UTF-8 texts up to a size.

import { make, iconButton } from "./dom.js";
import { size } from "./words.js";

const MAX_FILE_BYTES = 1 << 20;

/** The files of the next question, shown as chips. */
export class AttachedFiles {
  /** @param {HTMLElement} place
   * @param {(words: string) => void} tell */
  constructor(place, tell) {
    this.place = place;
    this.tell = tell;
    this.files = [];
  }

  /** @returns {{name: string, text: string}[]} the files, which are no longer attached then. */
  take() {
    const taken = this.files;
    this.files = [];
    this.show();
    return taken;
  }

  /** Attach these instead, as taken before. */
  put(files) {
    this.files = files;
    this.show();
  }

  /** @param {Iterable<File>} files */
  async add(files) {
    for (const file of files) {
      try {
        this.files.push({ name: file.name, text: await textOf(file) });
      } catch (error) {
        this.tell(`${file.name} was not attached: it ${error.message}.`);
      }
    }
    this.show();
  }

  show() {
    this.place.replaceChildren(...this.files.map((file) => {
      const remove = iconButton("close", `Remove ${file.name}`, () => {
        this.files = this.files.filter((each) => each !== file);
        this.show();
      });
      const told = make("small", { textContent: size(new Blob([file.text]).size) });
      return make("li", {}, make("span", { textContent: file.name }), told, remove);
    }));
  }
}

/** @returns {Promise<string>} @throws {Error} whose message continues "it ..." */
export async function textOf(file, maxBytes = MAX_FILE_BYTES) {
  if (file.size > maxBytes) throw new Error(`is larger than ${size(maxBytes)}`);
  const bytes = await file.arrayBuffer();
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    throw new Error("is not UTF-8 text");
  }
}

/** Call `take(files)` with what is dropped on `place` or pasted into `area`. */
export function takeDropped(place, area, take) {
  let depth = 0; // of elements that the pointer has entered
  const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  const mark = (change) => {
    depth = change === 0 ? 0 : Math.max(0, depth + change);
    place.classList.toggle("dropping", depth > 0);
  };
  place.addEventListener("dragenter", (event) => { if (hasFiles(event)) { event.preventDefault(); mark(1); } });
  place.addEventListener("dragleave", (event) => { if (hasFiles(event)) mark(-1); });
  place.addEventListener("dragover", (event) => { if (hasFiles(event)) event.preventDefault(); });
  place.addEventListener("drop", (event) => {
    if (!hasFiles(event)) return;
    event.preventDefault();
    mark(0);
    take(event.dataTransfer.files);
  });
  area.addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    take(event.clipboardData.files);
  });
}
