// The tab Chat: the list of conversations, the branch that is shown, the composer, and the answers that stream.

import { ask, resume, stop } from "./answer.js";
import { ServerError, info } from "./api.js";
import { add, branch, matches, messages, newConversation, show, siblings } from "./conversation.js";
import { download, h, icon, iconButton, notice } from "./dom.js";
import "./message.js";
import "./sampling.js";
import * as store from "./store.js";

const SAVE_EVERY = 1000; // ms between two saves of an answer that streams
const EXAMPLES = ["Tell me a story about a brave fox.", "What is 47 + 38?", "What colour is the sky?"];
const WIDE = matchMedia("(min-width: 900px)");

class ChatTab extends HTMLElement {
  connectedCallback() {
    if (this.log) return;
    this.running = new Map(); // by message id: conversation and AbortController
    this.views = new Map(); // by message id: what is on the screen
    this.build();
    this.open(newConversation());
    this.start();
  }

  build() {
    this.search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search the conversations",
      oninput: () => this.showList() });
    this.list = h("ul", { class: "conversations" });
    const file = h("input", { type: "file", accept: "application/json,.json", hidden: true,
      "aria-label": "File to import", onchange: () => this.import(file) });
    this.side = h("aside", { class: "side", "aria-label": "Conversations", hidden: !WIDE.matches },
      h("button", { type: "button", class: "new", onclick: () => this.open(newConversation(), true) },
        icon("plus"), "New chat"),
      this.search, this.list,
      h("footer", {},
        h("button", { type: "button", onclick: () => this.export() }, icon("download"), "Export"),
        h("button", { type: "button", onclick: () => file.click() }, icon("upload"), "Import"), file));
    this.panel = h("sampling-panel", { class: "panel", hidden: true, role: "complementary", "aria-label": "Settings" });
    this.panel.addEventListener("close", () => this.toggle(this.panel, this.panelButton));
    this.sideButton = iconButton("menu", "Conversations", () => this.toggle(this.side, this.sideButton),
      { "aria-expanded": String(WIDE.matches) });
    this.panelButton = iconButton("sliders", "Settings", () => this.toggle(this.panel, this.panelButton),
      { "aria-expanded": "false" });
    this.model = h("select", { "aria-label": "Model" });
    this.log = h("div", { class: "log", role: "log", "aria-live": "polite", "aria-label": "Messages", tabindex: 0,
      onscroll: () => this.scrolled() });
    this.box = h("textarea", { rows: 1, placeholder: "Write a message", "aria-label": "Message",
      oninput: () => this.fit(), onkeydown: (event) => this.key(event) });
    this.sendButton = h("button", { class: "send", "aria-label": "Send", title: "Send (Enter)" }, icon("send"));
    const composer = h("form", { class: "composer", onsubmit: (event) => this.submit(event) },
      this.box, this.sendButton);
    this.append(this.side,
      h("section", { class: "talk", "aria-label": "Conversation" },
        h("div", { class: "talk-bar" }, this.sideButton, this.model, this.panelButton), this.log, composer),
      this.panel);
    addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !this.isConnected) return;
      if (!WIDE.matches && !this.side.hidden) this.toggle(this.side, this.sideButton);
      else if (!event.defaultPrevented) this.stop();
    });
  }

  /** Show the saved conversations, and continue answers that streamed when the page was closed. */
  async start() {
    info().then(({ models, sampling }) => {
      this.model.replaceChildren(...models.map((name) => h("option", {}, name)));
      this.panel.suggest(sampling);
    }, (error) => notice(error.message, "error"));
    await this.showList();
    for (const conversation of await store.all()) {
      const cut = Object.values(conversation.nodes).filter((node) => node.running);
      if (cut.length && !branch(this.conversation).length) this.open(conversation);
      const shown = cut.length && conversation.id === this.conversation.id ? this.conversation : conversation;
      for (const node of cut) this.run(shown, shown.nodes[node.id], resume);
    }
  }

  async showList() {
    const words = this.search.value.trim();
    const found = (await store.all()).filter((one) => !words || matches(one, words));
    this.list.replaceChildren(...found.map((one) => h("li", {},
      h("button", { type: "button", class: "title", "aria-current": String(one.id === this.conversation.id),
        onclick: () => this.choose(one.id) }, one.title || "Untitled"),
      iconButton("trash", `Delete ${one.title || "Untitled"}`, () => this.remove(one)))));
    const nothing = words ? "Nothing found" : "No conversations yet";
    if (!found.length) this.list.append(h("li", { class: "nothing" }, nothing));
  }

  async choose(id) {
    const live = [...this.running.values()].find(({ conversation }) => conversation.id === id);
    this.open(live?.conversation ?? (await store.get(id)), true);
  }

  open(conversation, byHand = false) {
    this.conversation = conversation;
    this.show();
    if (!byHand) return;
    if (!WIDE.matches && !this.side.hidden) this.toggle(this.side, this.sideButton);
    this.showList();
    this.box.focus();
  }

  async remove(conversation) {
    if (!confirm(`Delete "${conversation.title}"?`)) return;
    for (const { node } of this.runs(conversation)) await this.halt(node);
    await store.remove(conversation.id);
    if (conversation.id === this.conversation.id) this.open(newConversation());
    this.showList();
  }

  async export() {
    download(await store.exported(), `verax-conversations-${new Date().toISOString().slice(0, 10)}.json`);
  }

  async import(file) {
    try {
      notice(`${await store.imported(await file.files[0].text())} conversations imported`);
    } catch (error) {
      notice(error.message, "error");
    }
    file.value = "";
    this.showList();
  }

  /** Put the branch that is shown on the screen, keeping the messages that are there already. */
  show() {
    const path = branch(this.conversation);
    const views = path.map((node) => {
      const view = this.views.get(node.id) ?? document.createElement("chat-message").init(node, this.actions(node));
      view.node = node;
      return [node.id, view];
    });
    this.views = new Map(views);
    const shown = views.map(([, view]) => view);
    const focused = this.log.contains(document.activeElement);
    if (shown.length !== this.log.children.length || shown.some((view, index) => view !== this.log.children[index])) {
      this.log.replaceChildren(...shown);
    }
    for (const node of path) this.update(node);
    if (!path.length) this.log.replaceChildren(h("div", { class: "welcome" }, h("h2", {}, "What shall we talk about?"),
      h("p", {}, "The model runs on the machine that serves this page. Conversations stay in this browser."),
      h("div", { class: "examples" }, EXAMPLES.map((text) =>
        h("button", { type: "button", onclick: () => this.say(null, text) }, text)))));
    if (focused && !this.log.contains(document.activeElement)) this.log.focus(); // its button is gone
    this.showSend();
    Object.assign(this, { following: true, lastTop: 0 });
    this.follow();
  }

  update(node) {
    const state = { running: this.running.has(node.id), siblings: siblings(this.conversation, node),
      followed: this.conversation.leaf !== node.id };
    this.views.get(node.id)?.update(state);
    this.follow();
  }

  actions(node) {
    return {
      edit: (text) => this.say(node.parent, text),
      retry: () => this.answer(this.conversation, node.parent),
      go: (sibling) => {
        show(this.conversation, sibling);
        store.put(this.conversation);
        this.show();
      },
      results: (texts) => this.toolResults(node, texts),
      grown: () => this.follow(),
    };
  }

  key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!this.runs().length) this.box.form.requestSubmit();
  }

  fit() {
    this.box.style.height = "auto";
    this.box.style.height = `${Math.min(this.box.scrollHeight, 240)}px`;
  }

  submit(event) {
    event.preventDefault();
    if (this.runs().length) return this.stop();
    const text = this.box.value.trim();
    if (!text) return;
    this.box.value = "";
    this.fit();
    this.say(this.conversation.leaf, text);
  }

  say(parent, text) {
    this.answer(this.conversation, add(this.conversation, parent, "user", text).id);
  }

  /** Answer the tool calls of a message, one text each, and let the model continue. */
  toolResults(node, texts) {
    let parent = node.id;
    node.toolCalls.forEach((call, index) => {
      parent = add(this.conversation, parent, "tool", texts[index], { toolCallId: call.id }).id;
    });
    this.answer(this.conversation, parent);
  }

  answer(conversation, parent) {
    const node = add(conversation, parent, "assistant", "");
    const body = { model: this.model.value || undefined, messages: messages(conversation, node, this.panel.system) };
    try {
      Object.assign(body, this.panel.body());
    } catch (error) { // an answer without these settings would be another one
      node.error = error.message;
      store.put(conversation).then(() => this.showList());
      return this.show();
    }
    this.run(conversation, node, (one, options) => ask(one, body, options));
  }

  /** Let an answer stream into its message, by `ask` or by `resume`, and save it as it grows. */
  async run(conversation, node, act) {
    const controller = new AbortController();
    node.running = true;
    delete node.error;
    this.running.set(node.id, { conversation, node, controller });
    let saved = performance.now();
    if (conversation === this.conversation) this.show();
    await store.put(conversation);
    this.showList();
    const changed = () => {
      this.update(node);
      if (performance.now() - saved < SAVE_EVERY) return;
      saved = performance.now();
      store.put(conversation);
    };
    try {
      if ((await again(act, node, { signal: controller.signal, changed })) === false) node.finish = "lost";
    } catch (error) {
      if (controller.signal.aborted) node.finish = "stopped";
      else node.error = error.message;
    }
    delete node.running;
    this.running.delete(node.id);
    await store.put(conversation);
    this.update(node);
    this.showSend();
  }

  /** Stay at the end of the log as it grows, until the reader scrolls up. */
  follow() {
    this.scrolled(); // the reader may have scrolled without an event as yet
    if (this.following) this.log.scrollTop = this.log.scrollHeight;
    this.lastTop = this.log.scrollTop;
  }

  scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.log;
    if (scrollHeight - scrollTop - clientHeight < 80) this.following = true;
    else if (scrollTop < this.lastTop) this.following = false;
    this.lastTop = scrollTop;
  }

  /** Answers of a conversation that stream. */
  runs(conversation = this.conversation) {
    return [...this.running.values()].filter((run) => run.conversation.id === conversation.id);
  }

  stop() {
    for (const { node } of this.runs()) this.halt(node);
  }

  async halt(node) {
    this.running.get(node.id)?.controller.abort();
    await stop(node);
  }

  showSend() {
    const busy = this.runs().length > 0;
    this.sendButton.replaceChildren(icon(busy ? "stop" : "send"));
    this.sendButton.setAttribute("aria-label", busy ? "Stop" : "Send");
    this.sendButton.title = busy ? "Stop (Esc)" : "Send (Enter)";
  }

  toggle(part, button) {
    part.hidden = !part.hidden;
    button.setAttribute("aria-expanded", String(!part.hidden));
    if (part.hidden) button.focus();
    else part.querySelector("button, textarea, input")?.focus();
  }
}

/** Run `act`; where the connection breaks, try to keep reading what the server makes meanwhile. */
async function again(act, node, options) {
  try {
    return await act(node, options);
  } catch (error) {
    if (options.signal.aborted || error instanceof ServerError) throw error;
    await new Promise((resolve) => setTimeout(resolve, 1000));
    return resume(node, options);
  }
}

customElements.define("chat-tab", ChatTab);
