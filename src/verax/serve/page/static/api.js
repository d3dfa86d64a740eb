// Requests to the server that served the page, its errors, and the API key if it wants one.

import { h } from "./dom.js";

const KEY = "verax-api-key"; // in sessionStorage: forgotten with the tab

export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Send a request. A body that is an object goes as JSON. Throws a ServerError with the server's own words. */
export async function request(path, { method, body, headers = {}, signal } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const response = await fetch(path, {
      method: method ?? (body ? "POST" : "GET"),
      headers: {
        ...(body ? { "Content-Type": "application/json" } : {}),
        ...(key ? { Authorization: `Bearer ${key}` } : {}),
        ...headers,
      },
      body: body ? JSON.stringify(body) : undefined,
      signal,
    });
    if (response.ok) return response;
    if (response.status !== 401) throw await failure(response);
    await askForKey(key !== null);
  }
}

/** The JSON of an answer. */
export async function json(path, options) {
  return (await request(path, options)).json();
}

let about = null;

/** What the server has: names of models, or null where it has none. Read once, if it can be read. */
export async function info() {
  about ??= await json("page/info");
  return about;
}

async function failure(response) {
  const text = await response.text();
  try {
    return new ServerError(JSON.parse(text).error.message, response.status);
  } catch {
    return new ServerError(`The server answered ${response.status} ${response.statusText}`, response.status);
  }
}

let asking = null; // one dialogue, however many requests wait for it

function askForKey(refused) {
  asking ??= new Promise((resolve, reject) => {
    const input = h("input", { type: "password", id: "api-key", autocomplete: "off", required: true });
    const dialog = h("dialog", { class: "dialog", "aria-labelledby": "key-title" },
      h("form", { method: "dialog", onsubmit: () => sessionStorage.setItem(KEY, input.value) },
        h("h2", { id: "key-title" }, "This server wants an API key"),
        h("p", {}, refused ? "The key was refused. Try another one." : "It is kept until you close this tab."),
        h("label", { for: "api-key" }, "API key"),
        input,
        h("button", { class: "primary" }, "Continue")));
    dialog.addEventListener("cancel", () => {
      sessionStorage.removeItem(KEY);
      reject(new ServerError("The server wants an API key", 401));
    });
    dialog.addEventListener("submit", resolve);
    dialog.addEventListener("close", () => dialog.remove());
    document.body.append(dialog);
    dialog.showModal();
  }).finally(() => (asking = null));
  return asking;
}

/** The events of a text/event-stream answer, parsed. Ends at `[DONE]` or with the connection. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const seen = Math.max(0, rest.length - 1); // an end may be split between two reads
      rest += value;
      for (let end = rest.indexOf("\n\n", seen); end >= 0; end = rest.indexOf("\n\n")) {
        const data = rest.slice(0, end).split("\n").filter((line) => line.startsWith("data:"));
        rest = rest.slice(end + 2);
        const text = data.map((line) => line.slice(5).trimStart()).join("\n");
        if (text === "[DONE]") return;
        if (text) yield JSON.parse(text);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
