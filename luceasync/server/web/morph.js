// Makes the children of one node like those of another, and leaves what is equal in place: so a
// selection, an opened fold, the focus and the reader's place outlive each update.

/**
 * Elements with `data-key` are matched by it. Those with `data-whole` are replaced as one if that
 * differs, else left alone. Whether a fold is open is left to the reader.
 * @param {Node} old
 * @param {Node} next which loses what is taken from it
 */
export function morph(old, next) {
  const keyed = keyedChildren(old);
  let at = old.firstChild;
  for (const wanted of [...next.childNodes]) {
    const found = keyed?.get(wanted.dataset?.key) ?? at;
    if (!found || !isAlike(found, wanted)) {
      old.insertBefore(wanted, at);
      continue;
    }
    if (found === at) at = at.nextSibling;
    else old.insertBefore(found, at);
    patch(found, wanted);
  }
  while (at) {
    const after = at.nextSibling;
    at.remove();
    at = after;
  }
}

function keyedChildren(node) {
  const found = [...(node.children ?? [])].filter((child) => child.dataset.key !== undefined);
  return found.length ? new Map(found.map((child) => [child.dataset.key, child])) : null;
}

function isAlike(one, other) {
  if (one.nodeType !== other.nodeType || one.nodeName !== other.nodeName) return false;
  if (one.nodeType !== Node.ELEMENT_NODE) return true;
  return one.dataset.key === other.dataset.key && one.dataset.whole === other.dataset.whole;
}

function patch(one, other) {
  if (one.nodeType === Node.TEXT_NODE) write(one, other.data);
  if (one.nodeType !== Node.ELEMENT_NODE || one.dataset.whole !== undefined) return;
  for (const { name } of [...one.attributes]) {
    if (name !== "open" && name !== "style" && !other.hasAttribute(name)) one.removeAttribute(name);
  }
  for (const { name, value } of other.attributes) {
    if (name !== "open" && name !== "style" && one.getAttribute(name) !== value) one.setAttribute(name, value);
  }
  // The page's policy allows styles that scripts set, not the attribute.
  if (one.style.cssText !== other.style.cssText) one.style.cssText = other.style.cssText;
  morph(one, other);
}

// Only what differs is written: ranges before it stay.
function write(node, text) {
  const { data } = node;
  if (data === text) return;
  let same = 0;
  while (same < data.length && data[same] === text[same]) same += 1;
  node.replaceData(same, data.length - same, text.slice(same));
}
