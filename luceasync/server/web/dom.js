// Creates elements.

export function make(name, fields, ...children) {
  const node = Object.assign(document.createElement(name), fields);
  node.append(...children);
  return node;
}

export function button(text, act) {
  const node = make("button", { type: "button", textContent: text });
  node.addEventListener("click", act);
  return node;
}
