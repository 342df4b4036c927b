// Makes elements. Text is only ever set as text: nothing that came from the router becomes markup.

const SVG = "http://www.w3.org/2000/svg";

export const $ = (id) => document.getElementById(id);

// el("td", {class: "n", title: text}, "text or elements", ...); `vars` sets custom properties, `on` listeners.
export function el(name, options = {}, ...children) {
  return filled(document.createElement(name), options, children);
}

export function svg(name, options = {}, ...children) {
  return filled(document.createElementNS(SVG, name), options, children);
}

function filled(element, { vars = {}, on = {}, ...attributes }, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  for (const [name, value] of Object.entries(vars)) element.style.setProperty(`--${name}`, value);
  for (const [name, listener] of Object.entries(on)) element.addEventListener(name, listener);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

// Sets the text only if it is another one: a selection or a screen reader is not disturbed for nothing.
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Renders a list of name and value; values may be elements.
export function facts(pairs) {
  return el("dl", {}, pairs.filter(([, value]) => value !== "" && value !== null).map(([name, value]) => [
    el("dt", {}, name), el("dd", {}, value),
  ]).flat());
}

// Has the rows of a table body opened by click and by Enter, and walked by the arrow keys.
export function walkable(body, open) {
  const row = (event) => event.target.closest("tr[data-id]");
  body.addEventListener("click", (event) => row(event) && open(row(event).dataset.id));
  body.addEventListener("keydown", (event) => {
    const here = row(event);
    if (!here) return;
    if (event.key === "Enter") open(here.dataset.id);
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (step) {
      event.preventDefault();
      let next = here[step];
      while (next && next.hidden) next = next[step];
      next?.focus();
    }
  });
}
