// Conversations in the browser: IndexedDB, which no server sees, with export and import as JSON.

const FORMAT = "verax-conversations";
const ROLES = ["user", "assistant", "tool"];
const ID = /^m[0-9a-f]{32}$/;

const opened = new Promise((resolve, reject) => {
  const request = indexedDB.open("verax", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("conversations", { keyPath: "id" });
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

async function run(mode, act) {
  const transaction = (await opened).transaction("conversations", mode);
  const request = act(transaction.objectStore("conversations"));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

/** All conversations, the last changed first. */
export async function all() {
  return (await run("readonly", (store) => store.getAll())).sort((a, b) => b.updated - a.updated);
}

export const get = (id) => run("readonly", (store) => store.get(id));
export const put = (conversation) => run("readwrite", (store) => store.put(conversation));
export const remove = (id) => run("readwrite", (store) => store.delete(id));

/** Everything, as a file. */
export async function exported() {
  const everything = { format: FORMAT, version: 1, conversations: await all() };
  return new Blob([JSON.stringify(everything, null, 1)], { type: "application/json" });
}

/** Put the conversations of an exported file next to the stored ones; the number of them. Throws on other files. */
export async function imported(text) {
  const file = JSON.parse(text);
  if (file?.format !== FORMAT || !Array.isArray(file.conversations)) {
    throw new Error("This file has no conversations of verax");
  }
  const checked = file.conversations.map(valid);
  for (const conversation of checked) await put(conversation);
  return checked.length;
}

/** A conversation with the fields that the page reads, each of its type. */
function valid(one) {
  const nodes = {};
  for (const node of Object.values(one.nodes ?? {})) {
    if (!ROLES.includes(node.role) || !ID.test(node.id)) throw new Error("A message of this file is broken");
    nodes[node.id] = {
      id: node.id,
      parent: nodes[node.parent] ? node.parent : null,
      role: node.role,
      content: String(node.content ?? ""),
      reasoning: String(node.reasoning ?? ""),
      toolCalls: (node.toolCalls ?? []).map(toolCall),
      toolCallId: node.toolCallId == null ? undefined : String(node.toolCallId),
      tokens: (node.tokens ?? []).map(token),
      stats: Object.fromEntries(Object.entries(node.stats ?? {}).filter(([, value]) => typeof value === "number")),
      finish: node.finish == null ? undefined : String(node.finish),
    };
  }
  if (!ID.test(one.id)) throw new Error("A conversation of this file is broken");
  return {
    id: one.id,
    title: String(one.title ?? ""),
    created: Number(one.created) || 0,
    updated: Number(one.updated) || 0,
    nodes,
    leaf: nodes[one.leaf] ? one.leaf : Object.keys(nodes).at(-1) ?? null,
  };
}

const toolCall = ({ id, name, arguments: text }) => ({ id: String(id), name: String(name), arguments: String(text) });
const token = (one) => ({
  text: String(one.text),
  logprob: Number(one.logprob),
  top: (one.top ?? []).map(([text, logprob]) => [String(text), Number(logprob)]),
});
