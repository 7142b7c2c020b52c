// The page: conversations, their messages, and the reply under way.

import { chunks, modelOf, requestOf } from "./api.js";
import { button, element, written } from "./dom.js";
import { figures, summary } from "./figures.js";
import * as store from "./store.js";

const $ = (id) => document.getElementById(id);
const SAVE_MS = 1000; // how often a reply under way is kept, against a page that is closed

let settings = store.settings();
let all = store.conversations();
let current = all[0] ?? store.newConversation();
let model = null;
const running = new Map(); // a conversation's id to what stops its reply

// What is said beside the conversation.

function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

function keep(conversation) {
  try {
    store.keep(conversation);
  } catch (error) {
    notice(`This browser has no room to keep the conversation (${error.message}); delete some.`);
  }
}

async function askModel() {
  model = await modelOf(settings);
  $("model").textContent = model.id;
  $("model").title = `context: ${model.max_model_len} tokens`;
  notice("");
}

async function showModel() {
  try {
    await askModel();
  } catch (error) {
    notice(error.status === 401 ? `${error.message}. The key goes into the settings.` : `The server: ${error.message}`);
  }
}

// Conversations.

function showList() {
  if (!all.includes(current) && current.messages.length) all.unshift(current);
  $("list").replaceChildren(...all.map((each) => {
    const title = store.titleOf(each);
    const chosen = each === current;
    return element("li", { class: chosen ? "chosen" : "" },
      button(title, () => choose(each), { class: "title", "aria-current": chosen ? "true" : false }),
      button("Rename", (event) => rename(each, event.target.parentElement), { "aria-label": `Rename ${title}` }),
      button("Delete", () => remove(each), { "aria-label": `Delete ${title}` }));
  }));
}

function choose(conversation) {
  current = conversation;
  notice("");
  menu(false);
  showList();
  showMessages();
  $("input").focus();
}

function rename(conversation, item) {
  const field = element("input", { "aria-label": "Title", maxlength: "200" });
  field.value = store.titleOf(conversation);
  let over = false; // leaving by a key takes the field away, which blurs it
  const end = (kept) => {
    if (over) return;
    over = true;
    if (kept && field.value.trim() !== store.titleOf(conversation)) {
      conversation.title = field.value.trim();
      keep(conversation);
    }
    showList();
  };
  field.addEventListener("blur", () => end(true));
  field.addEventListener("keydown", (event) => {
    if (event.isComposing || !["Enter", "Escape"].includes(event.key)) return;
    event.stopPropagation();
    end(event.key === "Enter");
    $("list").children[all.indexOf(conversation)]?.querySelector("button").focus();
  });
  item.replaceChildren(field);
  field.select();
  field.focus();
}

function remove(conversation) {
  if (!confirm(`Delete “${store.titleOf(conversation)}”?`)) return;
  running.get(conversation.id)?.abort();
  store.forget(conversation);
  all = all.filter((each) => each !== conversation);
  if (conversation === current) choose(all[0] ?? store.newConversation());
  else showList();
}

/** Where it is narrow, the list is behind a button. */
function menu(open) {
  document.body.classList.toggle("menu", open);
  $("menu").setAttribute("aria-expanded", String(open));
  if (open) $("new").focus();
}

// Messages.

function showMessages() {
  const made = current.messages.map((_, index) => messageOf(current, index));
  $("log").replaceChildren(...(made.length ? made : [element("p", { class: "empty" }, "What would you like to ask?")]));
  $("log").scrollTop = $("log").scrollHeight;
  showRunning();
}

function showRunning() {
  const runs = running.has(current.id);
  $("send").hidden = runs;
  $("stop").hidden = !runs;
  $("log").setAttribute("aria-busy", String(runs));
  document.body.classList.toggle("runs", runs);
}

function messageOf(conversation, index) {
  const message = conversation.messages[index];
  const mine = message.role === "user";
  const made = element("article", { class: `message ${message.role}`, "aria-label": mine ? "You" : "Model" });
  if (message.reasoning) made.append(element("details", { class: "reasoning", open: !message.content && message.runs },
    element("summary", {}, "Reasoning"), element("div", { class: "text" }, message.reasoning)));
  made.append(element("div", { class: "text" }, ...(mine ? [message.content] : written(message.content))));
  if (message.error) made.append(element("p", { class: "error", role: "alert" }, message.error));
  if (message.runs) return made;
  if (message.note) made.append(element("p", { class: "note" }, message.note));
  if (!mine && (message.timings || message.note)) made.append(panelOf(conversation, index));
  made.append(actionsOf(conversation, index, made));
  return made;
}

function actionsOf(conversation, index, made) {
  const message = conversation.messages[index];
  const actions = element("div", { class: "actions" });
  if (message.role === "assistant" && index === conversation.messages.length - 1) {
    actions.append(button(message.error ? "Try again" : "Regenerate", () => replyFrom(conversation, index)));
  }
  if (!message.content) return actions;
  actions.append(button("Edit", () => edit(conversation, index, made)));
  if (navigator.clipboard) { // browsers have none where a page comes over plain HTTP from elsewhere
    actions.append(button("Copy", async () => {
      await navigator.clipboard.writeText(message.content);
      $("status").textContent = "Copied.";
    }));
  }
  return actions;
}

function panelOf(conversation, index) {
  const message = conversation.messages[index];
  const last = index === conversation.messages.length - 1;
  const shown = figures(message);
  if (!shown) return element("p", { class: "note" }, summary(message));
  const line = element("summary", {}, summary(message));
  if (last) line.addEventListener("click", () => { // the next reply's is as this one was left
    settings.figures = line.parentElement.open ? "" : "open";
    store.keepSettings(settings);
  });
  return element("details", { class: "panel", open: last && settings.figures === "open" }, line, shown);
}

/** A message of the user's is sent again as edited, and what came after it is gone; the model's is only changed. */
function edit(conversation, index, made) {
  const message = conversation.messages[index];
  const mine = message.role === "user";
  const field = element("textarea", { "aria-label": "Edit the message", rows: "3" });
  field.value = message.content;
  const leave = () => {
    showMessages();
    $("input").focus();
  };
  const done = () => {
    if (running.has(conversation.id) || (mine && !field.value.trim())) return;
    message.content = field.value;
    if (mine) replyFrom(conversation, index + 1);
    else keep(conversation);
    leave();
  };
  const form = element("form", { class: "edit", onsubmit: (event) => { event.preventDefault(); done(); } },
    field, element("button", { type: "submit" }, mine ? "Send" : "Save"), button("Cancel", leave));
  field.addEventListener("keydown", (event) => {
    if (sends(event)) {
      event.preventDefault();
      done();
    } else if (event.key === "Escape" && !event.isComposing) {
      event.stopPropagation();
      leave();
    }
  });
  field.addEventListener("input", () => grow(field));
  made.replaceChildren(form);
  grow(field);
  field.focus();
}

// Replies.

/** Generate the message at ``index``; it and what comes after it are replaced. */
async function replyFrom(conversation, index) {
  if (running.has(conversation.id)) return;
  const before = conversation.messages.slice(0, index);
  const reply = { role: "assistant", content: "", runs: true };
  conversation.messages.splice(index, Infinity, reply);
  conversation.changed = Date.now();
  const stopping = new AbortController();
  running.set(conversation.id, stopping);
  keep(conversation);
  showMessages();
  showList();
  try {
    if (!model) await askModel();
    await receive(reply, conversation, requestOf(before, settings, model.id), stopping.signal);
  } catch (error) {
    if (!stopping.signal.aborted) model = null; // it may be another when the server is back
    if (stopping.signal.aborted) reply.note = "Stopped.";
    else reply.error = error instanceof TypeError ? `The server cannot be reached (${error.message}).` : error.message;
  }
  delete reply.runs;
  running.delete(conversation.id);
  if (all.includes(conversation)) keep(conversation);
  if (conversation !== current) return;
  showLast(index);
  showRunning();
  $("status").textContent = reply.error ? "" : reply.note || "The reply is complete.";
}

async function receive(reply, conversation, body, signal) {
  const begun = performance.now();
  let saved = begun;
  let drawing = false;
  for await (const chunk of chunks(body, settings, signal)) {
    const choice = chunk.choices[0];
    const said = choice?.delta ?? {};
    if (said.content || said.reasoning_content) reply.firstSeconds ??= (performance.now() - begun) / 1000;
    reply.content += said.content ?? "";
    if (said.reasoning_content) reply.reasoning = (reply.reasoning ?? "") + said.reasoning_content;
    if (choice?.finish_reason === "length") reply.note = "It ended at the limit of tokens or time.";
    if (chunk.timings) reply.timings = chunk.timings[0];
    if (!drawing) { // not more often than the screen
      drawing = true;
      requestAnimationFrame(() => {
        drawing = false;
        if (reply.runs && conversation === current) showLast(conversation.messages.indexOf(reply));
      });
    }
    if (performance.now() - saved > SAVE_MS) {
      saved = performance.now();
      if (all.includes(conversation)) keep(conversation);
    }
  }
}

/** Draw one message anew, and stay at the end where the reader is at the end. */
function showLast(index) {
  const log = $("log");
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  log.children[index]?.replaceWith(messageOf(current, index));
  if (follows) log.scrollTop = log.scrollHeight;
}

function stop() {
  running.get(current.id)?.abort();
}

// The message field and the settings.

function sends(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing;
}

function grow(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight + 2}px`;
}

function send() {
  const content = $("input").value;
  if (!content.trim() || running.has(current.id)) return;
  $("input").value = "";
  grow($("input"));
  current.messages.push({ role: "user", content });
  replyFrom(current, current.messages.length);
}

function showTheme() {
  document.documentElement.dataset.theme = settings.theme;
}

function begin() {
  const form = $("settings-form");
  for (const name of Object.keys(settings)) if (form.elements[name]) form.elements[name].value = settings[name];
  form.addEventListener("input", ({ target }) => {
    settings[target.name] = target.value;
    store.keepSettings(settings);
    showTheme();
  });
  form.elements.key.addEventListener("change", showModel);
  $("open-settings").addEventListener("click", () => $("settings").showModal());
  $("settings").addEventListener("close", () => $("input").focus());
  $("menu").addEventListener("click", (event) => {
    event.stopPropagation();
    menu(!document.body.classList.contains("menu"));
  });
  document.querySelector("main").addEventListener("click", () => menu(false));
  $("new").addEventListener("click", () => choose(store.newConversation()));
  $("stop").addEventListener("click", stop);
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("input").addEventListener("input", () => grow($("input")));
  $("input").addEventListener("keydown", (event) => {
    if (!sends(event)) return;
    event.preventDefault();
    send();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.isComposing || $("settings").open) return;
    if (!document.body.classList.contains("menu")) return stop();
    menu(false);
    $("menu").focus();
  });
  addEventListener("pagehide", () => running.forEach((stopping, id) => {
    stopping.abort(); // or its end would look like the server's fault
    keep(all.find((each) => each.id === id));
  }));
  addEventListener("storage", (event) => { // another page of this server's has changed something
    if (!store.isOurs(event.key)) return;
    const ours = all.filter((each) => running.has(each.id));
    all = store.conversations().map((each) => ours.find((kept) => kept.id === each.id) ?? each);
    const before = current;
    const gone = before.messages.length && !ours.includes(before);
    current = all.find((each) => each.id === before.id) ?? (gone ? all[0] ?? store.newConversation() : before);
    showList();
    if (current.id !== before.id || JSON.stringify(current) !== JSON.stringify(before)) showMessages();
  });
  for (const message of all.flatMap((each) => each.messages)) {
    if (!message.runs) continue; // the page was closed meanwhile
    delete message.runs;
    message.note = "Stopped.";
  }
  showTheme();
  showList();
  showMessages();
  showModel();
}

begin();
