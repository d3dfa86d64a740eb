// The tab Server: what /metrics says, read every two seconds while it is looked at.

import { request } from "./api.js";
import "./chart.js";
import { duration, h, short } from "./dom.js";

const EVERY = 2000; // ms
const KEPT = 150; // samples, five minutes
const WINDOW = 15; // samples over which latencies are taken

class ServerTab extends HTMLElement {
  connectedCallback() {
    this.samples ??= [];
    if (!this.charts) this.build();
    this.timer = setInterval(() => this.sample(), EVERY);
    this.sample();
  }

  disconnectedCallback() {
    clearInterval(this.timer);
  }

  build() {
    const chart = (...about) => document.createElement("line-chart").init(...about);
    this.charts = {
      throughput: chart("Throughput", ["generated", "prompt"], { unit: " tokens/s" }),
      queue: chart("Requests", ["running", "waiting"], { least: 2 }),
      cache: chart("Cache use", ["KV cache", "prefix hits"], { unit: "%", top: 100 }),
      first: chart("Time to first token", ["median", "95%"], { unit: " ms" }),
      token: chart("Time between tokens", ["median", "95%"], { unit: " ms" }),
      whole: chart("Time of a whole request", ["median", "95%"], { unit: " s" }),
    };
    this.tiles = h("dl", { class: "tiles" });
    this.problem = h("p", { class: "error", role: "alert" });
    this.tabIndex = 0; // nothing in it takes the focus, and it is to scroll by keyboard
    this.append(h("div", { class: "page wide" }, h("h2", {}, "Server"), this.problem, this.tiles,
      h("div", { class: "charts" }, Object.values(this.charts))));
  }

  async sample() {
    if (document.hidden || this.reading) return;
    this.reading = true;
    try {
      const text = await (await request("metrics")).text();
      this.samples.push({ time: performance.now() / 1000, values: parse(text) });
      this.samples.splice(0, this.samples.length - KEPT);
      this.problem.textContent = "";
      this.draw();
    } catch (error) {
      this.problem.textContent = error.message;
    } finally {
      this.reading = false;
    }
  }

  draw() {
    const { charts, samples } = this;
    const now = samples.at(-1);
    const each = (read) => samples.map((sample, index) => [now.time - sample.time, ...read(sample, index)]);
    const rate = (name) => (sample, index) => {
      const before = samples[index - 1];
      return before ? Math.max(0, gain(sample, before, name)) / (sample.time - before.time) : null;
    };
    const generated = rate("vllm:generation_tokens_total");
    const prompt = rate("vllm:prompt_tokens_total");
    charts.throughput.draw(each((...at) => [generated(...at), prompt(...at)]));
    charts.queue.draw(each(({ values }) => [values["vllm:num_requests_running"], values["vllm:num_requests_waiting"]]));
    charts.cache.draw(each((sample, index) => {
      const before = samples[Math.max(0, index - WINDOW)];
      const asked = gain(sample, before, "vllm:prefix_cache_queries_total");
      const hits = gain(sample, before, "vllm:prefix_cache_hits_total");
      return [100 * (sample.values["vllm:kv_cache_usage_perc"] ?? 0), asked > 0 ? (100 * hits) / asked : null];
    }));
    const latency = (name, scale) => each((sample, index) => {
      const before = samples[Math.max(0, index - WINDOW)];
      return [0.5, 0.95].map((part) => quantile(sample, before, name, part)).map((value) => value && value * scale);
    });
    charts.first.draw(latency("vllm:time_to_first_token_seconds", 1000));
    charts.token.draw(latency("vllm:inter_token_latency_seconds", 1000));
    charts.whole.draw(latency("vllm:e2e_request_latency_seconds", 1));
    const { values } = now;
    const hits = values["vllm:prefix_cache_hits_total"] / values["vllm:prefix_cache_queries_total"];
    const mean = values["vllm:time_to_first_token_seconds_sum"] / values["vllm:time_to_first_token_seconds_count"];
    this.tiles.replaceChildren(...[
      ["Requests served", short(values["vllm:request_success_total"] ?? 0)],
      ["Tokens generated", short(values["vllm:generation_tokens_total"] ?? 0)],
      ["Prompt tokens", short(values["vllm:prompt_tokens_total"] ?? 0)],
      ["First token, mean", mean ? duration(mean) : "–"],
      ["Prefix cache hits", hits >= 0 ? `${short(100 * hits)}%` : "–"],
      ["Preemptions", short(values["vllm:num_preemptions_total"] ?? 0)],
    ].map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  }
}

/** Prometheus' text: values by name, summed over labels, and of histograms the buckets as [limit, count]. */
function parse(text) {
  const values = {};
  for (const line of text.split("\n")) {
    const found = /^([\w:]+)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!found) continue;
    const [, name, labels = "", number] = found;
    const limit = /(?:^|,)le="([^"]+)"/.exec(labels)?.[1];
    if (limit === undefined) values[name] = (values[name] ?? 0) + Number(number);
    else {
      const buckets = (values[name] ??= new Map());
      const edge = limit === "+Inf" ? Infinity : Number(limit);
      buckets.set(edge, (buckets.get(edge) ?? 0) + Number(number));
    }
  }
  return values;
}

const gain = (sample, before, name) => (sample.values[name] ?? 0) - (before.values[name] ?? 0);

/** A quantile of what a histogram has got between two samples, linear within its bucket; null if it got nothing. */
function quantile(sample, before, name, part) {
  const buckets = sample.values[`${name}_bucket`];
  if (!buckets) return null;
  const old = before === sample ? undefined : before.values[`${name}_bucket`];
  const counts = [...buckets].sort(([a], [b]) => a - b).map(([edge, count]) => [edge, count - (old?.get(edge) ?? 0)]);
  const wanted = part * counts.at(-1)[1];
  if (!wanted) return null;
  let [low, below] = [0, 0];
  for (const [edge, count] of counts) {
    if (count >= wanted) return edge === Infinity ? low : low + ((wanted - below) / (count - below)) * (edge - low);
    [low, below] = [edge, count];
  }
  return low;
}

customElements.define("server-tab", ServerTab);
