// One answer while it streams: what each event adds to its message, and its speed.

import { ServerError, events, request } from "./api.js";

/**
 * Ask for an answer and fill its message as it streams.
 *
 * The server continues while the page is away (X-Conversation-Id), so an aborted signal only ends the reading;
 * `stop` ends the answer.
 */
export async function ask(node, body, { signal, changed }) {
  node.stats = { started: Date.now() };
  const headers = { "X-Conversation-Id": node.id };
  const streamed = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await request("v1/chat/completions", { body: streamed, headers, signal });
  await read(node, response, changed);
}

/** Read an answer again from its beginning. Its text stays until as much was read. False if the server has it no more. */
export async function resume(node, { signal, changed }) {
  const lost = (error) => error instanceof ServerError && [400, 404].includes(error.status);
  const response = await request(`v1/stream?conv_id=${node.id}&from=0`, { signal })
    .catch((error) => (lost(error) ? null : Promise.reject(error)));
  if (!response) return false;
  const copy = { content: "", reasoning: "", toolCalls: [], tokens: [], stats: { ...node.stats, chunks: 0 } };
  await read(copy, response, () => {
    if (copy.content.length + copy.reasoning.length < node.content.length + node.reasoning.length) return;
    Object.assign(node, copy);
    changed();
  });
  return true;
}

export function stop(node) {
  return request(`v1/stream?conv_id=${node.id}`, { method: "DELETE" }).catch(() => {}); // it may have ended by itself
}

async function read(node, response, changed) {
  for await (const event of events(response)) {
    if (event.error) throw new ServerError(event.error.message, response.status);
    apply(node, event);
    changed();
  }
}

function apply(node, event) {
  const { stats } = node;
  const choice = event.choices?.[0];
  const delta = choice?.delta ?? {};
  const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
  if (delta.content || reasoning || delta.tool_calls) {
    stats.first ??= Date.now();
    stats.last = Date.now();
    stats.chunks = (stats.chunks ?? 0) + 1;
  }
  if (delta.content && node.reasoning) stats.thought ??= Date.now();
  node.reasoning += reasoning;
  node.content += delta.content ?? "";
  for (const call of delta.tool_calls ?? []) {
    const known = (node.toolCalls[call.index] ??= { id: call.id, name: "", arguments: "" });
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
  for (const token of choice?.logprobs?.content ?? []) {
    const top = token.top_logprobs.map((other) => [other.token, other.logprob]);
    node.tokens.push({ text: token.token, logprob: token.logprob, top });
  }
  if (choice?.finish_reason) node.finish = choice.finish_reason;
  if (event.usage) stats.tokens = event.usage.completion_tokens;
  if (event.timings) {
    stats.promptMs = event.timings.prompt_ms;
    stats.answerMs = event.timings.predicted_ms;
  }
}

/** Seconds to the first token, tokens a second, number of tokens; null before the first. The server's times are better. */
export function speed({ started, first, last, chunks, tokens, promptMs, answerMs }) {
  if (!first) return null;
  const count = tokens ?? chunks;
  const seconds = answerMs ? answerMs / 1000 : (last - first) / 1000;
  const rate = seconds > 0 && count > 1 ? (count - 1) / seconds : null;
  return { first: (promptMs ?? first - started) / 1000, rate, count };
}
