// One message of a chat: text as Markdown while it streams, thinking, tool calls, token probabilities, its buttons.

import { speed } from "./answer.js";
import { copy, duration, h, iconButton, short } from "./dom.js";
import { showMarkdown } from "./markdown.js";

const RENDER_EVERY = 200; // ms between two renderings of an answer that streams

class ChatMessage extends HTMLElement {
  /** Build the parts. `actions` has the functions edit(text), retry(), go(sibling), results(texts), grown(). */
  init(node, actions) {
    this.node = node;
    this.actions = actions;
    this.dataset.role = node.role;
    this.setAttribute("role", "article");
    const name = { user: "You", assistant: "Answer", tool: "Tool result" }[node.role];
    this.setAttribute("aria-label", name);
    this.text = h("div", { class: "content" });
    this.chances = h("div", { class: "chances", hidden: true, tabindex: 0, role: "group",
      "aria-label": "Tokens and their probabilities" });
    this.thinking = h("details", { class: "thinking", hidden: true }, h("summary", {}), h("div", { class: "plain" }));
    this.calls = h("div", { class: "calls" });
    this.problem = h("p", { class: "error", role: "alert" });
    this.stats = h("span", { class: "stats" });
    this.buttons = h("div", { class: "buttons" });
    this.replaceChildren(this.thinking, this.text, this.chances, this.calls, this.problem,
      h("footer", {}, this.buttons, this.stats));
    return this;
  }

  /** Show the state of the message: whether it streams, its versions, whether others follow it. */
  update(state = this.state) {
    this.state = state;
    const { node } = this;
    const { running, siblings, followed } = state;
    this.running = running;
    this.setAttribute("aria-busy", String(running));
    this.showThinking();
    if (node.role === "assistant") this.render();
    else this.text.replaceChildren(h("div", { class: "plain" }, node.content));
    if (!running) this.showCalls(followed);
    this.problem.textContent = node.error ?? "";
    this.showStats();
    const buttons = `${running} ${siblings.map((one) => one.id)}`;
    if (buttons !== this.shownButtons) this.showButtons(running, siblings);
    this.shownButtons = buttons;
  }

  showThinking() {
    const { reasoning, content, stats } = this.node;
    if (!reasoning) return;
    const [summary, body] = this.thinking.children;
    const over = content || !this.running;
    const seconds = stats.thought && stats.first ? (stats.thought - stats.first) / 1000 : null;
    summary.textContent = over ? `Thought${seconds ? ` for ${duration(seconds)}` : ""}` : "Thinking …";
    this.thinking.hidden = false;
    body.textContent = reasoning;
  }

  /** Render as Markdown, at most once every RENDER_EVERY ms, and once more at the end. */
  async render() {
    const { content } = this.node;
    if (!content) {
      const dots = h("span", { class: "waiting", role: "img", "aria-label": "Waiting" });
      this.text.replaceChildren(...(this.running && !this.node.reasoning ? [dots] : []));
    }
    if (!content || this.rendering || content === this.rendered) return;
    this.rendering = true;
    const began = performance.now();
    this.rendered = content;
    await showMarkdown(this.text, content);
    this.actions.grown();
    // A long text takes longer to render: the page spends at most a third of its time on it.
    const pause = this.running ? Math.max(RENDER_EVERY, 2 * (performance.now() - began)) : 0;
    await new Promise((resolve) => setTimeout(resolve, pause));
    this.rendering = false;
    if (this.node.content !== this.rendered) this.render();
  }

  showCalls(answered) {
    const { toolCalls } = this.node;
    if (!toolCalls.length) return;
    const answers = toolCalls.map((call) => answered ? null :
      h("input", { type: "text", placeholder: "Result of this call", "aria-label": `Result of ${call.name}` }));
    const send = (event) => {
      event.preventDefault();
      this.actions.results(answers.map((answer) => answer.value));
    };
    this.calls.replaceChildren(h("form", { onsubmit: send },
      toolCalls.map((call, index) => h("div", { class: "call" },
        h("strong", {}, call.name), h("pre", { tabindex: 0 }, pretty(call.arguments)), answers[index])),
      answered ? null : h("button", {}, toolCalls.length > 1 ? "Return the results" : "Return the result")));
  }

  showStats() {
    const found = speed(this.node.stats);
    const end = { length: "cut at the longest answer", stopped: "stopped", lost: "interrupted" }[this.node.finish];
    const parts = found ? [
      `first token ${duration(found.first)}`,
      found.rate ? `${short(found.rate)} tokens/s` : null,
      `${found.count} tokens`,
    ] : [];
    this.stats.textContent = [...parts, end].filter(Boolean).join(" · ");
  }

  showButtons(running, siblings) {
    const { node, actions } = this;
    const buttons = [];
    if (siblings.length > 1) {
      const place = siblings.findIndex((one) => one.id === node.id);
      buttons.push(
        iconButton("left", "Previous version", () => actions.go(siblings[place - 1]), { disabled: place === 0 }),
        h("span", { class: "place" }, `${place + 1} / ${siblings.length}`),
        iconButton("right", "Next version", () => actions.go(siblings[place + 1]),
          { disabled: place === siblings.length - 1 }));
    }
    if (!running) {
      buttons.push(iconButton("copy", "Copy", () => copy(node.content)));
      if (node.role === "user") buttons.push(iconButton("edit", "Edit", () => this.edit()));
      if (node.role === "assistant") buttons.push(iconButton("retry", "Regenerate", () => actions.retry()));
      if (node.tokens.length) {
        buttons.push(iconButton("chance", "Token probabilities", (event) => this.showChances(event.currentTarget),
          { "aria-pressed": "false" }));
      }
    }
    this.buttons.replaceChildren(...buttons);
  }

  edit() {
    const area = h("textarea", { value: this.node.content, rows: 3, "aria-label": "Edit the message" });
    const form = h("form", {
      class: "edit",
      onsubmit: (event) => {
        event.preventDefault();
        this.actions.edit(area.value);
      },
      onkeydown: (event) => {
        if (event.key === "Escape") this.update();
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
          event.preventDefault();
          form.requestSubmit();
        }
      },
    }, area, h("div", {}, h("button", { class: "primary" }, "Send"),
      h("button", { type: "button", onclick: () => this.update() }, "Cancel")));
    this.text.replaceChildren(form);
    area.focus();
  }

  /** Each token coloured by its probability; pointing at one, or moving to it with the arrow keys, shows the others. */
  showChances(button) {
    const open = this.chances.hidden;
    button.setAttribute("aria-pressed", String(open));
    this.chances.hidden = !open;
    this.text.hidden = open;
    if (!open) return;
    const tip = h("div", { class: "tip", role: "status", hidden: true });
    const spans = this.node.tokens.map((token) =>
      h("span", { class: `token chance-${Math.min(4, Math.floor(Math.exp(token.logprob) * 5))}` }, token.text));
    let at = -1;
    const point = (index) => {
      if (index < 0 || index >= spans.length) return;
      spans[at]?.classList.remove("pointed");
      at = index;
      spans[at].classList.add("pointed");
      tip.replaceChildren(...chanceLines(this.node.tokens[at]));
      tip.hidden = false;
      const { bottom, left } = spans[at].getBoundingClientRect();
      tip.style.top = `${bottom + 6}px`;
      tip.style.left = `${Math.max(8, Math.min(left, innerWidth - 240))}px`;
    };
    const list = h("div", { class: "plain" }, spans);
    list.addEventListener("pointerover", (event) => point(spans.indexOf(event.target)));
    list.addEventListener("pointerleave", () => (tip.hidden = true));
    this.chances.onkeydown = (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step) point(at + step);
      if (event.key === "Escape") tip.hidden = true;
    };
    this.chances.replaceChildren(list, tip);
  }
}

function chanceLines({ text, logprob, top }) {
  const others = top.some(([other]) => other === text) ? top : [[text, logprob], ...top];
  return others.map(([other, chance]) =>
    h("div", { class: other === text ? "chosen" : "" }, h("code", {}, JSON.stringify(other)),
      h("span", {}, `${(100 * Math.exp(chance)).toFixed(1)}%`)));
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

customElements.define("chat-message", ChatMessage);
