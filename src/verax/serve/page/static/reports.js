// The tab Reports: files that `verax compare` and `verax bench` wrote into the folder that the server was given.

import { json, request } from "./api.js";
import { h, short } from "./dom.js";
import { showMarkdown } from "./markdown.js";

class ReportsTab extends HTMLElement {
  connectedCallback() {
    if (!this.list) this.build();
    this.load();
  }

  build() {
    this.filter = h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter the reports",
      oninput: () => this.showList() });
    this.list = h("ul", { class: "files" });
    this.view = h("article", { class: "content report", "aria-live": "polite" });
    this.append(h("div", { class: "page wide" }, h("h2", {}, "Reports"),
      h("div", { class: "split" }, h("div", { class: "list" }, this.filter, this.list), this.view)));
  }

  async load() {
    try {
      ({ prefix: this.folder, reports: this.reports } = await json("page/reports"));
      this.showList();
      const missing = this.folder ? "The folder has no reports yet."
        : "Start the server with --reports DIR to see the reports of a folder here.";
      if (!this.reports.length) this.view.replaceChildren(h("p", { class: "nothing" }, missing));
    } catch (error) {
      this.view.replaceChildren(h("p", { class: "error" }, error.message));
    }
  }

  showList() {
    const words = this.filter.value.toLowerCase();
    const found = (this.reports ?? []).filter(({ name }) => name.toLowerCase().includes(words));
    this.list.replaceChildren(...found.map((report) => {
      const about = `${DATE.format(report.modified * 1000)} · ${size(report.size)}`;
      const label = [h("span", { class: "name" }, report.name), h("small", {}, about)];
      if (report.name.endsWith(".html")) {
        return h("li", {}, h("a", { href: this.address(report), target: "_blank", rel: "noopener" }, label));
      }
      const current = { "aria-current": String(report.name === this.shown) };
      return h("li", {}, h("button", { type: "button", ...current, onclick: () => this.show(report) }, label));
    }));
  }

  address({ name }) {
    return this.folder + name.split("/").map(encodeURIComponent).join("/");
  }

  async show(report) {
    this.shown = report.name;
    this.showList();
    try {
      const response = await request(this.address(report));
      const shown = await this.content(report.name, response);
      if (this.shown === report.name) {
        this.view.replaceChildren(h("h3", {}, report.name), shown);
        const { top } = this.view.getBoundingClientRect();
        if (top < 0 || top > innerHeight / 2) this.view.scrollIntoView();
      }
    } catch (error) {
      this.view.replaceChildren(h("p", { class: "error" }, error.message));
    }
  }

  async content(name, response) {
    if (name.endsWith(".png")) return h("img", { src: URL.createObjectURL(await response.blob()), alt: name });
    const text = await response.text();
    const box = h("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": name });
    await showMarkdown(box, name.endsWith(".json") ? `\`\`\`json\n${text}\n\`\`\`` : text);
    return box;
  }
}

const DATE = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "short" });
const size = (bytes) => (bytes < 1024 ? `${bytes} B` : `${short(bytes / 1024)} KB`);

customElements.define("reports-tab", ReportsTab);
