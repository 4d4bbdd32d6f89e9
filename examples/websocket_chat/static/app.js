// The page: conversations, the one that is shown, and what is typed.

import { Activity } from "./activity.js";
import { Conversation } from "./conversation.js";
import { MessageList } from "./messages.js";
import * as store from "./store.js";

const HUES = [182, 262, 32, 330, 132, 82, 222, 2];
const SUGGESTIONS = [
  "Tell me a story about Mia and a boat.",
  "What is 34 + 21?",
  "Tom has a red kite. Anna has a small dog. Who has a dog?",
];
const STORIES = ["a fox and a lamp", "a bear and a boat", "a mouse and a bell", "a frog and a kite", "an owl and a drum", "a cat and a hat"];
const $ = (id) => document.getElementById(id);

const conversations = new Map();
let current = null;
let used = 0;

const view = new MessageList($("messages"), {
  regenerate: () => current.regenerate(),
  edit: (index, text) => current.edit(index, text),
});

// --- conversations ---

function add(saved = {}) {
  const conversation = new Conversation({ hue: HUES[used++ % HUES.length], ...saved }, changed);
  conversations.set(conversation.id, conversation);
  return conversation;
}

function open(conversation) {
  if (current) current.draft = $("prompt").value;
  current = conversation;
  store.setOpen(conversation.id);
  document.documentElement.style.setProperty("--hue", conversation.hue);
  $("system").value = conversation.system;
  $("temperature").value = conversation.temperature;
  $("temperature-value").value = conversation.temperature.toFixed(1);
  $("tools").checked = conversation.tools;
  $("prompt").value = conversation.draft;
  $("hint").textContent = "";
  grow();
  drawer(null);
  showAll();
  toEnd();
}

function remove(conversation) {
  conversation.close();
  conversations.delete(conversation.id);
  store.forget(conversation.id);
  if (conversation === current) open([...conversations.values()].at(-1) ?? add());
  else showList();
}

function forgetAll() {
  if (!confirm("Forget all chats? They are kept in this browser only.")) return;
  [...conversations.values()].forEach(remove);
}

function newChat() {
  const empty = [...conversations.values()].find((one) => !one.messages.length);
  open(empty ?? add());
  $("prompt").focus();
}

function changed(conversation, what) {
  if (what === "list") {
    save(conversation);
    showList();
    if (!conversation.turn && conversation.messages.length) announce(conversation);
  }
  if (what === "state") showList();
  if (conversation !== current) return;
  if (what === "text") {
    view.update(conversation);
    if (pinned) toEnd();
  } else {
    showCurrent();
    if (pinned || what === "messages") toEnd();
  }
}

function announce(conversation) {
  const last = conversation.messages.at(-1);
  if (conversation === current && last.role === "assistant") {
    $("announce").textContent = `${last.note ? `${last.note}. ` : ""}Answer: ${last.text}`;
  }
}

function save(conversation) {
  if (conversation.messages.length) store.save(conversation);
}

function restore() {
  for (const saved of store.load()) {
    // A turn that a reload cut short left an answer without an end.
    const last = saved.messages.at(-1);
    if (last?.role === "assistant" && (!last.metrics || last.metrics.live)) {
      last.note = "Interrupted: the page was reloaded";
      last.failed = true;
    }
    add(saved);
  }
  return conversations.get(store.getOpen()) ?? add();
}

// --- showing ---

function showAll() {
  showList();
  showCurrent();
}

function showList() {
  $("forget").hidden = ![...conversations.values()].some(({ messages }) => messages.length);
  $("conversations").replaceChildren(...[...conversations.values()].reverse().map(listItem));
}

function listItem(conversation) {
  const item = document.createElement("li");
  item.style.setProperty("--hue", conversation.hue);
  const button = document.createElement("button");
  button.type = "button";
  button.className = "conversation";
  const title = document.createElement("span");
  title.textContent = conversation.title;
  button.append(title);
  button.onclick = () => open(conversation);
  if (conversation === current) button.setAttribute("aria-current", "true");
  if (conversation.turn) {
    item.dataset.state = "running";
    button.setAttribute("aria-description", "answering");
  }
  const away = document.createElement("button");
  away.type = "button";
  away.className = "remove";
  away.textContent = "×";
  away.setAttribute("aria-label", `Delete ${conversation.title}`);
  away.onclick = () => remove(conversation);
  item.append(button, away);
  return item;
}

function showCurrent() {
  view.show(current);
  const running = Boolean(current.turn);
  $("title").textContent = current.title;
  document.title = `${current.title} – asyncllm chat`;
  $("welcome").hidden = current.messages.length > 0;
  $("send").hidden = running;
  $("stop").hidden = !running;
  if (!running) $("hint").textContent = "";
  const lost = current.connection === "lost";
  $("banner").hidden = !lost;
  if (lost) {
    const { delay, reason } = current.lost;
    const why = reason ? `Connection closed (${reason})` : "Connection lost";
    $("banner").textContent = `${why}. Reconnecting in ${(delay / 1000).toFixed(delay < 1000 ? 1 : 0)} s…`;
  }
}

// --- scrolling: follows the text until the reader scrolls away from the end ---

let pinned = true;
const scroll = $("scroll");

function toEnd() {
  scroll.scrollTop = scroll.scrollHeight;
}

scroll.addEventListener("scroll", () => {
  pinned = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 48;
  $("latest").hidden = pinned;
});
$("latest").onclick = toEnd;

// --- writing ---

const prompt = $("prompt");

function grow() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight, 180)}px`;
}

function submit(text) {
  if (!text) return;
  if (current.turn) {
    $("hint").textContent = "Wait for the answer, or stop it, to send this.";
    return;
  }
  prompt.value = "";
  grow();
  pinned = true;
  current.ask(text);
}

prompt.addEventListener("input", grow);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit(prompt.value.trim());
  }
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit(prompt.value.trim());
});
$("stop").onclick = () => current.stop();
$("new-chat").onclick = newChat;
$("forget").onclick = forgetAll;
$("many").onclick = () => {
  const started = STORIES.map((story) => {
    const conversation = add();
    conversation.ask(`Tell me a story about ${story}.`);
    return conversation;
  });
  open(started[0]);
};
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    if (document.body.dataset.drawer) drawer(null);
    else current.stop();
  } else if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    newChat();
  }
});
$("suggestions").append(
  ...SUGGESTIONS.map((text) => {
    const item = document.createElement("li");
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.onclick = () => submit(text);
    item.append(button);
    return item;
  }),
);

// --- settings and drawers ---

$("system").addEventListener("change", () => {
  current.system = $("system").value;
  save(current);
});
$("temperature").addEventListener("input", () => {
  current.temperature = Number($("temperature").value);
  $("temperature-value").value = current.temperature.toFixed(1);
});
$("tools").addEventListener("change", () => {
  current.tools = $("tools").checked;
  save(current);
});
$("show-settings").onclick = () => {
  const settings = $("settings");
  settings.hidden = !settings.hidden;
  $("show-settings").setAttribute("aria-expanded", String(!settings.hidden));
  if (!settings.hidden) $("system").focus();
};

function drawer(name) {
  const before = document.body.dataset.drawer;
  const shown = before === name ? null : name;
  if (shown) document.body.dataset.drawer = shown;
  else delete document.body.dataset.drawer;
  $("veil").hidden = !shown;
  $("show-rail").setAttribute("aria-expanded", String(shown === "rail"));
  $("show-activity").setAttribute("aria-expanded", String(shown === "activity"));
  if (shown) $(shown).querySelector(".close").focus();
  else if (before) $(`show-${before}`).focus();
}

$("show-rail").onclick = () => drawer("rail");
$("show-activity").onclick = () => drawer("activity");
for (const way of [$("veil"), ...document.querySelectorAll(".close")]) way.onclick = () => drawer(null);

// --- start ---

open(restore());
new Activity((responseId) => {
  for (const one of conversations.values()) {
    if (one.knows(responseId)) return one.hue;
  }
  return null;
});
