// The panel next to a chat: system prompt, sampling, form of the answer, tools. Kept in the browser.

import { info } from "./api.js";
import { field, h, iconButton } from "./dom.js";

const KEY = "verax-sampling";

// Name in the API, label, step of the input. An empty field leaves the choice to the model's own defaults.
const NUMBERS = [
  ["temperature", "Temperature", 0.05],
  ["top_p", "Top p", 0.01],
  ["top_k", "Top k", 1],
  ["min_p", "Min p", 0.01],
  ["max_tokens", "Longest answer", 1],
  ["seed", "Seed", 1],
];

class SamplingPanel extends HTMLElement {
  connectedCallback() {
    if (this.form) return;
    this.values = JSON.parse(localStorage.getItem(KEY) ?? "{}");
    const text = (name, rows, placeholder = "") =>
      h("textarea", { name, rows, placeholder, value: this.values[name] ?? "", spellcheck: "false" });
    const number = ([name, label, step]) => field(label,
      h("input", { type: "number", name, placeholder: "default", value: this.values[name] ?? "", step }));
    const way = (name) => h("option", { value: name, selected: name === this.values.thinking }, name);
    const thinking = h("select", { name: "thinking" }, ["the model's default", "on", "off"].map(way));
    const chances = h("input", { type: "checkbox", name: "logprobs", checked: this.values.logprobs ?? true });
    this.form = h("form", { oninput: () => this.read(), onsubmit: (event) => event.preventDefault() },
      h("header", {}, h("h2", {}, "Settings"),
        iconButton("close", "Close the settings", () => this.dispatchEvent(new Event("close")))),
      field("System prompt", text("system", 3)),
      h("div", { class: "pairs" }, NUMBERS.map(number)),
      field("Stop texts", text("stop", 2), "One on each line."),
      field("Thinking", thinking),
      h("label", { class: "check" }, chances, "Token probabilities"),
      h("details", {}, h("summary", {}, "Structured answers and tools"),
        field("JSON schema of the answer", text("schema", 4, '{"type": "object", …}')),
        field("Tools", text("tools", 4, '[{"type": "function", …}]'), "A JSON list in OpenAI's form.")),
      h("p", { class: "error", role: "alert" }));
    this.append(this.form);
    this.read();
    info().then(({ ranges }) => {
      for (const [name] of NUMBERS) Object.assign(this.form.elements[name], ranges[name]);
    }, () => {}); // the chat shows why there is no answer
  }

  read() {
    const data = new FormData(this.form);
    this.values = Object.fromEntries([...data].filter(([, value]) => value !== ""));
    this.values.logprobs = data.has("logprobs");
    localStorage.setItem(KEY, JSON.stringify(this.values));
    let wrong = "";
    try {
      this.body();
    } catch (error) {
      wrong = error.message;
    }
    this.form.querySelector(".error").textContent = wrong;
  }

  get system() { return this.values.system ?? ""; }

  /** Sampling for a model that recommends none, by name: in place of empty fields, unless a temperature is given. */
  suggest(values) {
    this.suggested = values;
    for (const name in values) this.form.elements[name].placeholder = `${values[name]}: none is recommended`;
  }

  /** Fields of the request. Throws an Error if a JSON field is not JSON. */
  body({ values, suggested } = this) {
    const body = values.temperature ? {} : { ...suggested };
    for (const [name] of NUMBERS) if (values[name]) body[name] = Number(values[name]);
    if (values.stop) body.stop = values.stop.split("\n").filter(Boolean);
    if (/^(on|off)$/.test(values.thinking)) body.chat_template_kwargs = { enable_thinking: values.thinking === "on" };
    if (values.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 4 });
    if (values.schema) {
      const schema = parsed(values.schema, "JSON schema");
      body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    }
    if (values.tools) body.tools = parsed(values.tools, "Tools");
    return body;
  }
}

function parsed(text, name) {
  try {
    return JSON.parse(text);
  } catch {
    throw new Error(`${name}: this is not JSON yet`);
  }
}

customElements.define("sampling-panel", SamplingPanel);
