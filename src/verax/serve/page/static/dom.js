// Elements, icons, notices and the clipboard: the few helpers that every tab uses.

const SVG = "http://www.w3.org/2000/svg";

/** An element. `on…` attributes are listeners; true sets an attribute, false leaves it out, as null does a child. */
export function h(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** An SVG element, as `h` makes HTML ones. */
export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child != null));
  return element;
}

// Paths in a box of 24 by 24, drawn as strokes.
const ICONS = {
  chat: "M4 5h16v11H9l-5 4z",
  clips: "M4 5h16v14H4zM10 9l5 3-5 3z",
  sentences: "M4 4h7v7H4zM13 4h7v7h-7zM4 13h7v7H4zM13 13h7v7h-7z",
  server: "M4 19V5M4 19h16M8 15l4-5 3 3 5-7",
  reports: "M6 3h8l4 4v14H6zM9 12h6M9 16h6",
  theme: "M12 4a8 8 0 1 0 8 8 6 6 0 0 1-8-8z",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  retry: "M5 12a7 7 0 1 0 2-5M5 4v4h4",
  edit: "M4 20l1-4L16 5l3 3L8 19z",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  play: "M9 6l9 6-9 6z",
  plus: "M12 5v14M5 12h14",
  menu: "M4 7h16M4 12h16M4 17h16",
  sliders: "M4 8h9M17 8h3M4 16h3M11 16h9M15 6v4M9 14v4",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  download: "M12 4v11M7 11l5 5 5-5M5 20h14",
  upload: "M12 16V5M7 9l5-5 5 5M5 20h14",
  chance: "M5 20V12M10 20V5M15 20v-6M20 20V9",
  close: "M6 6l12 12M18 6L6 18",
};

export function icon(name) {
  return svg("svg", { class: "icon", viewBox: "0 0 24 24", "aria-hidden": "true" }, svg("path", { d: ICONS[name] }));
}

/** A button that shows an icon only; its label is for screen readers and the tooltip. */
export function iconButton(name, label, onclick, attributes = {}) {
  const all = { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...attributes };
  return h("button", all, icon(name));
}

/** A labelled form field. */
export function field(label, control, hint) {
  const id = `field-${++fields}`;
  control.id = id;
  if (hint) control.setAttribute("aria-describedby", `${id}-hint`);
  const below = hint ? h("small", { id: `${id}-hint` }, hint) : null;
  return h("div", { class: "field" }, h("label", { for: id }, label), control, below);
}
let fields = 0;

/** Show a line at the bottom of the page for some seconds, and announce it to screen readers. */
export function notice(text, kind = "info") {
  const line = h("p", { class: `notice ${kind}` }, text);
  document.querySelector(".notices").append(line);
  setTimeout(() => line.remove(), kind === "error" ? 8000 : 3000);
}

/** Put text on the clipboard, also where the page has no https and browsers have no clipboard interface. */
export async function copy(text) {
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else {
    const area = h("textarea", { class: "off-screen", value: text, "aria-hidden": "true" });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  notice("Copied");
}

/** Save a blob as a file. */
export function download(blob, name) {
  const address = URL.createObjectURL(blob);
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}

/** A random id of 33 letters and digits. `crypto.randomUUID` needs https. */
export function newId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return "m" + [...bytes].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** A number with about three digits. */
export function short(number) {
  if (number >= 1e6) return `${(number / 1e6).toPrecision(3)}M`;
  if (number >= 1e4) return `${(number / 1e3).toPrecision(3)}k`;
  if (number >= 100 || Number.isInteger(number)) return String(Math.round(number));
  return String(Number(number.toPrecision(number < 1 ? 2 : 3)));
}

/** Seconds in words. */
export function duration(seconds) {
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${short(seconds)} s`;
}
