// What the browser keeps. Each conversation has a key of its own, so that two open pages do not undo each other's.

const CONVERSATION = "exactkv.conversation.";
const SETTINGS = "exactkv.settings";

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}

function isConversation(value) {
  return typeof value?.id === "string" && Array.isArray(value.messages);
}

/** All conversations, the one that was changed last first. */
export function conversations() {
  return Object.keys(localStorage)
    .filter((key) => key.startsWith(CONVERSATION))
    .map((key) => parsed(localStorage.getItem(key)))
    .filter(isConversation)
    .sort((a, b) => b.changed - a.changed);
}

export function newConversation() {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0"));
  return { id: id.join(""), title: "", changed: Date.now(), messages: [] };
}

/** Throws where the browser has no room left. */
export function keep(conversation) {
  localStorage.setItem(CONVERSATION + conversation.id, JSON.stringify(conversation));
}

export function forget(conversation) {
  localStorage.removeItem(CONVERSATION + conversation.id);
}

export function isOurs(key) {
  return key === null || key.startsWith(CONVERSATION);
}

export function titleOf(conversation) {
  const first = conversation.messages.find((message) => message.role === "user")?.content.trim();
  return conversation.title || first?.split("\n")[0].slice(0, 60) || "New conversation";
}

/** Texts, as the fields of the form have them; "" is: not given. */
export function settings() {
  return { system: "", temperature: "", top_p: "", max_tokens: "", seed: "", key: "", theme: "", figures: "open",
    ...parsed(localStorage.getItem(SETTINGS)) };
}

export function keepSettings(values) {
  localStorage.setItem(SETTINGS, JSON.stringify(values));
}
