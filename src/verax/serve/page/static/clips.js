// The tab Clips: a form, the queue with progress and previews, and the gallery of finished clips.

import { info, json, request } from "./api.js";
import { download, duration, field, h, icon, iconButton, notice } from "./dom.js";

const BUSY_EVERY = 700; // ms between two looks at a queue that moves
const IDLE_EVERY = 10_000;
const MAX_PICTURE = 10 << 20; // bytes
const SETTINGS = "verax-clips"; // in localStorage: what each clip was asked for, the newest 200

// Name in the API, label, attributes of the input. An empty field leaves the choice to the model.
const NUMBERS = [
  ["num_frames", "Frames", { min: 1 }],
  ["num_inference_steps", "Steps", { min: 1 }],
  ["seed", "Seed", { min: 0 }],
  ["fps", "Frames a second", { min: 1 }],
  ["guidance_scale", "Guidance", { min: 0, step: 0.1 }],
  ["flow_shift", "Flow shift", { min: 0, step: 0.1 }],
  ["half_size_steps", "First steps at half size", { min: 0 }],
];

// Fields whose values the server lists.
const CHOICES = { recipe: "Recipe of few steps", cache: "Step cache" };

class ClipsTab extends HTMLElement {
  connectedCallback() {
    if (!this.form) this.build();
    this.watch();
  }

  disconnectedCallback() {
    clearTimeout(this.timer);
  }

  build() {
    this.cards = new Map(); // by id
    [this.picture, this.lastPicture] = ["First picture", "Last picture"].map((alt) => {
      const shown = h("img", { alt, hidden: true });
      const input = h("input", { type: "file", accept: "image/png,image/jpeg,image/webp", onchange: () => {
        shown.hidden = !input.files.length;
        if (input.files.length) shown.src = URL.createObjectURL(input.files[0]);
      } });
      return { input, shown };
    });
    const number = ([name, label, limits]) =>
      field(label, h("input", { type: "number", name, placeholder: "default", ...limits }));
    this.problem = h("p", { class: "error", role: "alert" });
    this.form = h("form", { class: "card clip-form", onsubmit: (event) => this.create(event) },
      field("Prompt", h("textarea", { name: "prompt", rows: 4, required: true,
        placeholder: "Such as: a red circle floats left over a blue to green gradient" })),
      field("First picture (optional)", this.picture.input), this.picture.shown,
      field("Last picture (optional, for models that take one)", this.lastPicture.input), this.lastPicture.shown,
      h("div", { class: "pairs" }, field("Size", h("input", { name: "size", placeholder: "default",
        pattern: "[0-9]+x[0-9]+", title: "Width x height, such as 832x480" })), NUMBERS.slice(0, 3).map(number)),
      h("details", {}, h("summary", {}, "More"), h("div", { class: "pairs" }, NUMBERS.slice(3).map(number)),
        this.choices = h("div", { class: "pairs" }), field("Not wanted", h("textarea", { name: "negative_prompt", rows: 2 }))),
      this.loras = h("p", { class: "stats", hidden: true }),
      h("button", { class: "primary" }, "Create the clip"), this.problem);
    this.queue = h("div", { class: "queue", "aria-live": "polite" });
    this.gallery = h("div", { class: "gallery" });
    this.append(h("div", { class: "page wide" }, h("h2", {}, "Clips"), h("div", { class: "split" }, this.form,
      h("div", {}, h("h3", {}, "Queue"), this.queue, h("h3", {}, "Gallery"), this.gallery))));
  }

  /** Fields and lines that depend on what the server has. */
  showServer({ video_choices: choices = {}, video_loras: loras = [] }) {
    this.shown = true;
    this.choices.replaceChildren(...Object.entries(choices).map(([name, values]) => field(CHOICES[name], h("select",
      { name }, h("option", { value: "" }, "none"), values.map((value) => h("option", { value }, value))))));
    this.loras.hidden = !loras.length;
    this.loras.textContent = `LoRA: ${loras.join(", ")}`;
  }

  async create(event) {
    event.preventDefault();
    this.problem.textContent = "";
    const body = {};
    for (const [name, value] of new FormData(this.form)) if (typeof value === "string" && value) body[name] = value;
    for (const [name] of NUMBERS) if (name in body) body[name] = Number(body[name]);
    const settings = { ...body };
    try {
      for (const [name, { input }] of [["image_reference", this.picture], ["last_image", this.lastPicture]])
        if (input.files.length) body[name] = { image_url: await dataAddress(input.files[0]) };
      const job = await json("v1/videos", { body });
      remember(job.id, settings);
      notice("The clip is in the queue");
    } catch (error) {
      this.problem.textContent = error.message;
    }
    this.watch();
  }

  /** Show the state of all clips now, and keep looking while the tab is open. */
  async watch() {
    clearTimeout(this.timer);
    let wait = IDLE_EVERY;
    try {
      const server = await info();
      if (!server.videos) throw new Error("This server has no video model. Start it with --video-model.");
      if (!this.shown) this.showServer(server);
      const { data } = await json("v1/videos?limit=100&order=desc");
      if (data.some(active)) wait = BUSY_EVERY;
      this.show(data);
    } catch (error) {
      this.queue.replaceChildren(h("p", { class: "error" }, error.message));
    }
    clearTimeout(this.timer);
    if (this.isConnected) this.timer = setTimeout(() => this.watch(), wait);
  }

  show(jobs) {
    for (const id of this.cards.keys()) if (!jobs.some((job) => job.id === id)) this.drop(id);
    for (const job of jobs.toReversed()) { // the oldest one first: each goes before or after the rows that are there
      const card = this.cards.get(job.id) ?? this.addCard(job);
      const place = active(job) ? this.queue : this.gallery;
      if (card.parentElement !== place) place[active(job) ? "append" : "prepend"](card);
      const state = `${job.status} ${job.progress} ${job.seconds_left}`;
      if (card.state !== state) this.fill(card, job);
      card.state = state;
    }
    const places = [[this.queue, "Nothing is being made."], [this.gallery, "Finished clips appear here."]];
    for (const [part, words] of places) {
      const cards = part.querySelectorAll(".clip").length;
      if (!cards) part.replaceChildren(h("p", { class: "nothing" }, words));
      else part.querySelectorAll(":scope > p").forEach((line) => line.remove());
    }
  }

  addCard(job) {
    const card = h("article", { class: "clip", "aria-label": job.prompt });
    this.cards.set(job.id, card);
    this.gallery.prepend(card);
    return card;
  }

  drop(id) {
    this.cards.get(id).remove();
    this.cards.delete(id);
  }

  fill(card, job) {
    const picture = (card.picture ??= h("div", { class: "picture" }));
    const settings = Object.entries({ ...remembered(job.id), ...known(job) }).map(([name, value]) =>
      [h("dt", {}, name.replaceAll("_", " ")), h("dd", {}, String(value))]);
    const about = h("details", {}, h("summary", {}, "Settings"), h("dl", {}, settings));
    about.open = card.querySelector("details")?.open ?? false;
    const parts = [picture, h("p", { class: "prompt" }, job.prompt)];
    if (active(job)) {
      const left = job.seconds_left == null ? "" : `, ${duration(job.seconds_left)} left`;
      const label = job.status === "queued" ? "Waiting" : `${job.progress}%${left}`;
      parts.push(h("div", { class: "progress" },
        h("progress", { max: 100, value: job.progress, "aria-label": "Progress" }),
        h("span", {}, label), iconButton("close", "Cancel", () => this.remove(job))));
      if (job.progress > 0) this.showVariant(card, job, "preview");
    } else if (job.status === "failed") {
      parts.push(h("p", { class: "error" }, job.error?.message ?? "This clip failed."), h("div", { class: "buttons" },
        iconButton("retry", "Use these settings", () => this.reuse(job)),
        iconButton("trash", "Delete", () => this.remove(job))));
    } else {
      const seconds = job.completed_at - job.created_at;
      parts.push(h("div", { class: "buttons" },
        iconButton("download", "Download", () => this.download(job)),
        iconButton("retry", "Use these settings", () => this.reuse(job)),
        iconButton("trash", "Delete", () => this.remove(job)),
        h("span", { class: "stats" }, seconds >= 0 ? `made in ${duration(seconds)}` : "")));
      this.showVariant(card, job, "thumbnail");
    }
    card.replaceChildren(...parts, about);
  }

  /** Show a picture of the clip; of a finished one with a button that plays it. */
  async showVariant(card, job, variant) {
    try {
      const address = URL.createObjectURL(await content(job, variant));
      const image = h("img", { src: address, alt: "", onload: () => URL.revokeObjectURL(address) });
      const play = h("button", { type: "button", class: "play", "aria-label": `Play: ${job.prompt}`,
        onclick: () => this.play(card, job) }, icon("play"));
      card.picture.replaceChildren(image, ...(variant === "thumbnail" ? [play] : []));
    } catch {
      // A preview does not exist yet.
    }
  }

  async play(card, job) {
    try {
      const video = h("video", { controls: true, loop: true, autoplay: true, "aria-label": job.prompt });
      video.muted = true;
      video.src = URL.createObjectURL(await content(job, "video"));
      card.picture.replaceChildren(video);
      video.focus();
    } catch (error) {
      notice(error.message, "error");
    }
  }

  async download(job) {
    try {
      download(await content(job, "video"), `${job.id}.mp4`);
    } catch (error) {
      notice(error.message, "error");
    }
  }

  reuse(job) {
    const settings = { ...remembered(job.id), ...known(job), prompt: job.prompt };
    // A setting that the clip did not have is empty; files have no names, and stay.
    for (const input of this.form.elements) if (input.name) input.value = settings[input.name] ?? "";
    this.form.elements.prompt.focus();
  }

  async remove(job) {
    try {
      await request(`v1/videos/${encodeURIComponent(job.id)}`, { method: "DELETE" });
    } catch (error) {
      notice(error.message, "error");
    }
    this.watch();
  }
}

const active = (job) => ["queued", "in_progress"].includes(job.status);

/** Settings that the server names itself. */
function known(job) {
  const names = ["model", "size", "seconds", "negative_prompt", ...Object.keys(CHOICES),
    ...NUMBERS.map(([name]) => name)];
  const given = names.filter((name) => job[name] != null && job[name] !== "");
  return Object.fromEntries(given.map((name) => [name, job[name]]));
}

async function content(job, variant) {
  return (await request(`v1/videos/${encodeURIComponent(job.id)}/content?variant=${variant}`)).blob();
}

const settingsOfAll = () => JSON.parse(localStorage.getItem(SETTINGS) ?? "[]");
const remembered = (id) => settingsOfAll().find(([one]) => one === id)?.[1] ?? {};

function remember(id, { prompt, ...settings }) {
  localStorage.setItem(SETTINGS, JSON.stringify([[id, settings], ...settingsOfAll()].slice(0, 200)));
}

function dataAddress(file) {
  if (file.size > MAX_PICTURE) throw new Error("The picture is larger than 10 MB");
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error("The picture cannot be read"));
    reader.readAsDataURL(file);
  });
}

customElements.define("clips-tab", ClipsTab);
