// Elements. All text goes in as text: nothing that a model says is read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export const element = (tag, attributes = {}, ...children) => filled(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) =>
  filled(document.createElementNS(SVG, tag), attributes, children);
export const button = (text, onclick, attributes = {}) =>
  element("button", { type: "button", onclick, ...attributes }, text);

/** A text with its blocks of code, inline code and bold as elements; all else as it stands. */
export function written(text) {
  return text.split(/^(```[^\n]*\n[\s\S]*?(?:^```[^\S\n]*$\n?|$(?![\s\S])))/m).map((part) => {
    const block = /^```[^\n]*\n([\s\S]*?)(?:^```[^\S\n]*\n?)?$(?![\s\S])/m.exec(part);
    if (block) return element("pre", { tabindex: "0" }, element("code", {}, block[1]));
    return element("span", {}, ...part.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((piece) => {
      if (/^`[^`\n]+`$/.test(piece)) return element("code", {}, piece.slice(1, -1));
      if (/^\*\*[^*\n]+\*\*$/.test(piece)) return element("strong", {}, piece.slice(2, -2));
      return piece;
    }));
  });
}
