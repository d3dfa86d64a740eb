// Line charts as SVG: a few series over time, a legend with the latest values, and a line that follows the pointer.

import { h, short, svg } from "./dom.js";

const HEIGHT = 160;
const LEFT = 44;
const BOTTOM = 18;
const TOP = 8;

class LineChart extends HTMLElement {
  /** `series` are names in the order of the colours; `top` is the axis's end, or `least` the least of it. */
  init(title, series, { unit = "", top, least = 0 } = {}) {
    Object.assign(this, { series, unit, top, least });
    this.plot = svg("svg", { role: "img" });
    this.legend = h("ul", { class: "legend" });
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => this.draw(this.rows));
    this.append(h("h3", {}, title), this.plot, this.legend);
    this.label = title;
    this.draw([]);
    return this;
  }

  /** Draw rows of [seconds ago, value of each series, …]; a value may be null. */
  draw(rows) {
    this.rows = rows;
    this.width = this.plot.clientWidth || 400;
    this.plot.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    const values = rows.flatMap(([, ...row]) => row.filter((value) => value != null));
    this.limit = this.top ?? ceiling(Math.max(this.least, ...values));
    this.span = Math.max(60, ...rows.map(([ago]) => ago));
    const grid = [0, 0.5, 1].map((part) => {
      const y = this.y(part * this.limit);
      return svg("g", {}, svg("line", { class: "grid", x1: LEFT, x2: this.width, y1: y, y2: y }),
        svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, short(part * this.limit)));
    });
    const times = [[LEFT, `${Math.round(this.span)} s ago`, "start"], [this.width, "now", "end"]].map(([x, text, anchor]) =>
      svg("text", { x, y: HEIGHT - 3, "text-anchor": anchor }, text));
    const lines = this.series.map((_, index) =>
      svg("path", { class: `line series-${index}`, d: this.path(rows, index) }));
    this.cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.plot.replaceChildren(...grid, ...times, ...lines, this.cursor);
    this.describe(rows.at(-1));
  }

  path(rows, index) {
    let pen = "M";
    return rows.map(([ago, ...row]) => {
      if (row[index] == null) {
        pen = "M";
        return "";
      }
      const step = `${pen}${this.x(ago).toFixed(1)} ${this.y(row[index]).toFixed(1)}`;
      pen = "L";
      return step;
    }).join("");
  }

  x(ago) {
    return this.width - (ago / this.span) * (this.width - LEFT);
  }

  y(value) {
    return TOP + (1 - Math.min(1, value / this.limit)) * (HEIGHT - TOP - BOTTOM);
  }

  describe(row) {
    const texts = this.series.map((name, index) => {
      const value = row?.[index + 1];
      return [name, value == null ? "–" : `${short(value)}${this.unit}`];
    });
    this.legend.replaceChildren(...texts.map(([name, value], index) =>
      h("li", { class: `series-${index}` }, `${name} `, h("b", {}, value))));
    this.plot.setAttribute("aria-label", `${this.label}: ${texts.map((text) => text.join(" ")).join(", ")}`);
  }

  point(event) {
    if (!this.rows.length) return;
    const box = this.plot.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * this.width;
    const distance = ([ago]) => Math.abs(this.x(ago) - x);
    const row = this.rows.reduce((best, one) => (distance(one) < distance(best) ? one : best));
    this.cursor.setAttribute("x1", this.x(row[0]));
    this.cursor.setAttribute("x2", this.x(row[0]));
    this.cursor.setAttribute("visibility", "visible");
    this.describe(row);
  }
}

/** The next 1, 2 or 5 times a power of ten. */
function ceiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value) * power;
}

customElements.define("line-chart", LineChart);
