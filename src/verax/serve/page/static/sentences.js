// The tab Sentences: lines of text, their similarities as a matrix, and the nearest neighbours of each.

import { info, json } from "./api.js";
import { field, h } from "./dom.js";

const MAX_LINES = 32; // as many as the matrix stays readable with
const NEIGHBOURS = 3;
const EXAMPLE = ["The cat is asleep on the sofa.", "A kitten naps on the couch.", "The train leaves at nine.",
  "Our train departs at 9 o'clock.", "It will rain tomorrow.", "Bring an umbrella, showers are expected."].join("\n");

class SentencesTab extends HTMLElement {
  connectedCallback() {
    if (this.lines) return;
    this.lines = h("textarea", { rows: 8, value: EXAMPLE });
    this.problem = h("p", { class: "error", role: "alert" });
    this.result = h("div", { class: "result", "aria-live": "polite" });
    this.button = h("button", { class: "primary" }, "Compare");
    const form = h("form", { class: "card", onsubmit: (event) => this.compare(event) },
      field("One sentence on each line", this.lines,
        `At most ${MAX_LINES} lines. The nearer two meanings, the nearer to 1.`),
      this.button, this.problem);
    this.result.append(h("p", { class: "nothing" }, "The similarity of every two sentences appears here."));
    this.append(h("div", { class: "page wide" }, h("h2", {}, "Sentences"),
      h("div", { class: "split" }, form, this.result)));
  }

  async compare(event) {
    event.preventDefault();
    const lines = this.lines.value.split("\n").map((line) => line.trim()).filter(Boolean);
    const tooMany = `These are ${lines.length} lines, at most ${MAX_LINES} can be compared.`;
    this.problem.textContent = lines.length > MAX_LINES ? tooMany : "";
    if (lines.length < 2 || lines.length > MAX_LINES) return;
    this.button.disabled = true;
    try {
      const { embeddings: model } = await info();
      if (!model) throw new Error("This server has no encoder. Start it with --embedding-model.");
      const { data } = await json("v1/embeddings", { body: { input: lines, encoding_format: "float", model } });
      const vectors = data.sort((a, b) => a.index - b.index).map(({ embedding }) => unit(embedding));
      this.show(lines, vectors.map((one) => vectors.map((other) => dot(one, other))));
    } catch (error) {
      this.problem.textContent = error.message;
    } finally {
      this.button.disabled = false;
    }
  }

  show(lines, matrix) {
    const numbers = lines.map((_, index) => h("th", { scope: "col", title: lines[index] }, index + 1));
    const rows = matrix.map((row, i) => h("tr", {},
      h("th", { scope: "row", title: lines[i] }, h("span", {}, `${i + 1}`), h("span", { class: "line" }, lines[i])),
      row.map((value, j) =>
        h("td", { class: `heat-${heat(value)}`, title: `${lines[i]}\n${lines[j]}` }, value.toFixed(2)))));
    const nearest = matrix.map((row, i) => {
      const others = row.map((value, j) => [value, j]).filter(([, j]) => j !== i).sort(([a], [b]) => b - a);
      return h("li", {}, h("p", {}, lines[i]), h("ol", {}, others.slice(0, NEIGHBOURS).map(([value, j]) =>
        h("li", {},
          h("meter", { min: 0, max: 1, value: Math.max(0, value), "aria-label": `Similarity ${value.toFixed(2)}` }),
          h("span", { class: "stats" }, value.toFixed(2)), h("span", {}, lines[j])))));
    });
    this.result.replaceChildren(
      h("h3", {}, "Similarity"),
      h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": "Similarity matrix" },
        h("table", { class: "matrix" }, h("thead", {}, h("tr", {}, h("td", {}), numbers)), h("tbody", {}, rows))),
      h("h3", {}, "Nearest neighbours"), h("ul", { class: "nearest" }, nearest));
  }
}

const dot = (a, b) => a.reduce((sum, value, index) => sum + value * b[index], 0);
const unit = (vector) => {
  const length = Math.sqrt(dot(vector, vector)) || 1;
  return vector.map((value) => value / length);
};

/** Shade of a similarity, 0 to 9. */
const heat = (value) => Math.max(0, Math.min(9, Math.floor(value * 10)));

customElements.define("sentences-tab", SentencesTab);
