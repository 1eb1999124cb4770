// Creates elements, and icons.

/** An element with these properties; `data`: its data attributes, `style`: its CSS properties. */
export function make(name, { data = {}, style = {}, aria = {}, ...fields } = {}, ...children) {
  const node = Object.assign(document.createElement(name), fields);
  Object.assign(node.dataset, data);
  for (const [property, value] of Object.entries(style)) node.style.setProperty(property, value);
  for (const [property, value] of Object.entries(aria)) node.setAttribute(`aria-${property}`, value);
  node.append(...children);
  return node;
}

/** A button with words. */
export function button(text, act, fields = {}) {
  const node = make("button", { type: "button", textContent: text, ...fields });
  node.addEventListener("click", act);
  return node;
}

/** A button with an icon, and words for those who do not see it. */
export function iconButton(name, label, act, fields = {}) {
  const node = make("button", { type: "button", className: "icon", title: label, ...fields }, icon(name));
  node.setAttribute("aria-label", label);
  if (act) node.addEventListener("click", act);
  return node;
}

const ICONS = { // strokes on a field of 24 by 24
  attach: "M20 11.5 12 19.5a5 5 0 0 1-7-7l8.5-8.5a3.4 3.4 0 0 1 4.8 4.8l-8.4 8.4a1.7 1.7 0 0 1-2.4-2.4l7.7-7.7",
  check: "m5 13 4.5 4.5L19 7",
  close: "M6 6l12 12M18 6 6 18",
  copy: "M9 9h10v11H9zM15 9V5H5v11h4",
  down: "M12 5v14m-6-6 6 6 6-6",
  edit: "M4 20h4L19 9l-4-4L4 16z",
  export: "M12 4v11m-4-4 4 4 4-4M5 20h14",
  go: "M5 5v14l14-7z",
  left: "m14 6-6 6 6 6",
  live: "M3 12h4l3-8 4 16 3-8h4",
  menu: "M4 7h16M4 12h16M4 17h16",
  more: "M6 12h.01M12 12h.01M18 12h.01",
  new: "M12 5v14M5 12h14",
  redo: "M19 12a7 7 0 1 1-2-5l2 2m0-5v5h-5",
  right: "m10 6 6 6-6 6",
  send: "M12 19V5m-6 6 6-6 6 6",
  settings: "M4 7h10m4 0h2M4 17h2m4 0h10M16 4.5v5M8 14.5v5",
  stop: "M7 7h10v10H7z",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
};

/** @returns {SVGElement} */
export function icon(name) {
  const made = (tag, fields) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [field, value] of Object.entries(fields)) node.setAttribute(field, value);
    return node;
  };
  const drawing = made("svg", { viewBox: "0 0 24 24", class: `drawing draw-${name}`, "aria-hidden": "true" });
  drawing.append(made("path", { d: ICONS[name] }));
  return drawing;
}
