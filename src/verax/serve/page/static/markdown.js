// Markdown that the server rendered and cleaned: the one place where HTML from outside is put into the page.

import { json } from "./api.js";
import { copy, h, iconButton } from "./dom.js";

const MAX_RENDERED = 128 * 1024; // characters; the server renders no longer texts

/** Show a text as Markdown in an element; as plain text if it is too long, or the server cannot render it. */
export async function showMarkdown(element, text) {
  try {
    if (text.length > MAX_RENDERED) throw new Error("too long");
    const { html } = await json("page/markdown", { body: { text } });
    element.innerHTML = html;
  } catch {
    element.replaceChildren(h("div", { class: "plain" }, text));
    return;
  }
  for (const table of element.querySelectorAll("table")) {
    const scroll = h("div", { class: "scroll", tabindex: 0 });
    table.replaceWith(scroll);
    scroll.append(table);
  }
  for (const block of element.querySelectorAll("pre")) {
    const language = block.firstElementChild?.className.replace("language-", "") ?? "";
    const bar = h("div", { class: "code-bar" }, h("span", {}, language),
      iconButton("copy", "Copy the code", () => copy(block.textContent)));
    const frame = h("div", { class: "code" }, bar);
    block.tabIndex = 0;
    block.replaceWith(frame);
    frame.append(block);
  }
}
