// A conversation as a tree: editing a message or asking again adds a sibling, and `leaf` says which branch is shown.

import { newId } from "./dom.js";

export function newConversation() {
  const now = Date.now();
  return { id: newId(), title: "", created: now, updated: now, nodes: {}, leaf: null };
}

/** Add a message below a parent (null: a first one) and show it. */
export function add(conversation, parent, role, content, more = {}) {
  const node = { id: newId(), parent, role, content, reasoning: "", toolCalls: [], tokens: [], stats: {}, ...more };
  conversation.nodes[node.id] = node;
  conversation.leaf = node.id;
  conversation.updated = Date.now();
  if (!conversation.title && role === "user") conversation.title = content.trim().split("\n")[0].slice(0, 80);
  return node;
}

/** Messages of the branch that is shown, the first one first. */
export function branch(conversation) {
  const path = [];
  const { nodes, leaf } = conversation;
  for (let node = nodes[leaf]; node; node = nodes[node.parent]) path.unshift(node);
  return path;
}

/** Messages with the same parent, in the order in which they were added. */
export function siblings(conversation, node) {
  return Object.values(conversation.nodes).filter((other) => other.parent === node.parent);
}

/** Show the branch of a message, down to its newest end. */
export function show(conversation, node) {
  for (let next = node; next; ) {
    conversation.leaf = next.id;
    next = Object.values(conversation.nodes).findLast((other) => other.parent === conversation.leaf);
  }
}

/** The branch as messages of the API, up to and without a message. */
export function messages(conversation, before, system) {
  const path = branch(conversation);
  const end = path.findIndex((node) => node.id === before.id);
  const list = system ? [{ role: "system", content: system }] : [];
  for (const node of end < 0 ? path : path.slice(0, end)) {
    const message = { role: node.role, content: node.content };
    if (node.role === "tool") message.tool_call_id = node.toolCallId;
    if (node.toolCalls.length) {
      message.tool_calls = node.toolCalls.map(({ id, ...call }) => ({ id, type: "function", function: call }));
    }
    list.push(message);
  }
  return list;
}

/** True if a title or a message has the words, whatever their case. */
export function matches(conversation, words) {
  const wanted = words.toLowerCase();
  const texts = [conversation.title, ...Object.values(conversation.nodes).map((node) => node.content)];
  return texts.some((text) => text.toLowerCase().includes(wanted));
}
