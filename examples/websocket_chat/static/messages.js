// The messages of one conversation. Text is only ever set as text.

import { split } from "./blocks.js";
import { codeBlock, markdown, patch } from "./markdown.js";

export class MessageList {
  // actions: {regenerate(), edit(index, text)}
  constructor(list, actions) {
    this.list = list;
    this.actions = actions;
    list.addEventListener("click", ({ target }) => {
      if (target.matches(".copy")) copy(target, target.parentElement.querySelector("code").textContent);
    });
  }

  show(conversation) {
    const { messages, turn } = conversation;
    const items = messages.map((message, index) => {
      const last = index === messages.length - 1;
      return message.role === "user"
        ? this.question(message, index, turn)
        : this.reply(message, last, turn);
    });
    this.list.replaceChildren(...items);
    this.shown = turn ? { conversation, message: turn.message, item: items.at(-1) } : null;
  }

  // The answer under way has grown.
  update(conversation) {
    const shown = this.shown;
    if (shown?.message !== conversation.turn?.message) return this.show(conversation);
    fill(shown.item.querySelector(".body"), shown.message, true);
    shown.item.querySelector(".metrics").textContent = metricsText(shown.message.metrics);
  }

  question(message, index, turn) {
    const item = element("li", "message user");
    item.append(element("span", "hidden", "You: "), element("p", "text", message.text));
    if (!turn) {
      const edit = button("Edit", () => this.editor(item, message, index));
      const tools = element("div", "tools");
      tools.append(edit);
      item.append(tools);
    }
    return item;
  }

  editor(item, message, index) {
    const form = element("form", "editor");
    const area = element("textarea");
    area.value = message.text;
    area.rows = 3;
    area.setAttribute("aria-label", "Edit your message");
    const send = element("button", "primary", "Send again");
    send.type = "submit";
    const cancel = button("Cancel", () => item.replaceWith(this.question(message, index, null)));
    form.append(area, cancel, send);
    form.onsubmit = (event) => {
      event.preventDefault();
      if (area.value.trim()) this.actions.edit(index, area.value.trim());
    };
    form.onkeydown = (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        cancel.click();
      } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        form.requestSubmit();
      }
    };
    item.replaceChildren(form);
    area.focus();
  }

  reply(message, last, turn) {
    const running = last && turn;
    const item = element("li", "message assistant");
    if (running) item.dataset.state = "running";
    const body = element("div", "body");
    const thoughts = element("details", "thoughts");
    thoughts.append(element("summary"), element("p"));
    // As the reader left it, when the message is made anew.
    thoughts.open = Boolean(message.opened);
    thoughts.ontoggle = () => (message.opened = thoughts.open);
    body.append(thoughts, element("div", "text"), element("ul", "calls"));
    fill(body, message, running);
    item.append(element("span", "hidden", "Answer: "), body);
    if (message.note) {
      const note = element("p", message.failed ? "note failed" : "note", message.note);
      item.append(note);
    }
    const foot = element("div", "foot");
    foot.append(element("span", "metrics", metricsText(message.metrics)));
    const tools = element("div", "foot-tools");
    if (!running && message.text) {
      const whole = button("Copy", () => copy(whole, message.text));
      tools.append(whole);
    }
    if (last && !turn) tools.append(button("Regenerate", () => this.actions.regenerate()));
    foot.append(tools);
    item.append(foot);
    return item;
  }
}

// Thoughts, text and calls of an answer.
function fill(body, message, running) {
  const [thoughts, text, calls] = body.children;
  const { reasoning = "", calls: made = [] } = message;
  const thinking = running && !message.text && !made.length;
  thoughts.hidden = !reasoning;
  setText(thoughts.children[0], thinking ? "Thinking…" : "Thoughts");
  setText(thoughts.children[1], reasoning);
  thoughts.classList.toggle("running", Boolean(thinking));
  write(text, message.text);
  text.hidden = !message.text && (Boolean(reasoning) || made.length > 0);
  made.forEach((call, i) => fillCard(calls.children[i] ?? calls.appendChild(card()), call, running));
  while (calls.children.length > made.length) calls.lastChild.remove();
  calls.hidden = !made.length;
}

function card() {
  const item = element("li", "call");
  const head = element("p", "call-head");
  head.append(element("code"), element("span", "call-state"));
  item.append(head, element("pre"), element("pre", "output"));
  return item;
}

function fillCard(item, call, running) {
  const [head, given, output] = item.children;
  const failed = call.output?.startsWith("error: ");
  const state = call.output === undefined
    ? call.whole ? "called" : running ? "calling…" : "cut off"
    : failed ? "failed" : "done";
  item.dataset.state = state;
  setText(head.children[0], call.name);
  setText(head.children[1], state);
  setText(given, call.whole ? pretty(call.arguments) : call.arguments);
  given.hidden = !given.textContent || given.textContent === "{}";
  setText(output, call.output ?? "");
  output.hidden = call.output === undefined;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

// Shows an answer's Markdown, and its data as monospaced blocks.
function write(node, text) {
  const blocks = split(text).flatMap((part) => (part.data ? [codeBlock(part.text.trimEnd())] : markdown(part.text)));
  patch(node, blocks.length ? blocks : [element("p")]);
}

function setText(node, text) {
  patch(node, [document.createTextNode(text)]);
}

function metricsText(metrics) {
  if (!metrics) return "";
  const parts = [];
  if (metrics.ttft !== null) parts.push(`first token ${Math.round(metrics.ttft * 1000)} ms`);
  if (metrics.rate) parts.push(`${Math.round(metrics.rate)} tokens/s`);
  parts.push(`${metrics.tokens} ${metrics.tokens === 1 ? "token" : "tokens"}`);
  if (metrics.cached) parts.push(`${metrics.cached} of ${metrics.prompt} prompt tokens cached`);
  return parts.join("  ·  ");
}

// Copies a text, and says so on the button that was pressed.
async function copy(pressed, text) {
  let copied = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copied = copySelected(text); // no clipboard without TLS, but on this machine
  }
  pressed.textContent = copied ? "Copied" : "Not allowed";
  setTimeout(() => (pressed.textContent = "Copy"), 1500);
}

function copySelected(text) {
  const area = element("textarea", "hidden");
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}

function element(name, className = "", text = "") {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text) node.textContent = text;
  return node;
}

function button(label, action) {
  const node = element("button", "quiet", label);
  node.type = "button";
  node.onclick = action;
  return node;
}
