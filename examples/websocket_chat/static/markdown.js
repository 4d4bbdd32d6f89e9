// Markdown as elements. No HTML is ever parsed: markup in an answer stays text, and what is not
// http, https or mailto is no link. Images are links to them, so that no answer makes a request.

import { Lexer } from "./vendor/marked.js";

const SAFE_LINK = /^(https?:\/\/|mailto:)/i;
const OPTIONS = { gfm: true, breaks: true };

// The elements of a text's blocks.
export function markdown(text) {
  try {
    return blocks(new Lexer(OPTIONS).lex(text));
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    return [make("p", text)]; // nested deeper than the stack
  }
}

export function codeBlock(text, language) {
  const block = make("div", make("pre", make("code", text)));
  block.className = "code";
  const copy = make("button", "Copy");
  copy.type = "button";
  copy.className = "quiet copy";
  if (language) block.dataset.language = language;
  block.append(copy);
  return block;
}

function blocks(tokens) {
  return tokens.map(block).filter(Boolean);
}

function block(token) {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "heading":
      return make(`h${Math.min(token.depth + 2, 6)}`, ...inline(token.tokens));
    case "paragraph":
      return make("p", ...inline(token.tokens));
    case "text":
      return make("span", ...inline(token.tokens ?? [token]));
    case "code":
      return codeBlock(token.text, token.lang);
    case "blockquote":
      return make("blockquote", ...blocks(token.tokens));
    case "hr":
      return make("hr");
    case "list":
      return list(token);
    case "table":
      return table(token);
    case "checkbox":
      return make("span", token.checked ? "☑ " : "☐ ");
    default:
      return make("p", token.raw);
  }
}

function list({ ordered, start, items }) {
  const node = make(ordered ? "ol" : "ul", ...items.map((item) => make("li", ...blocks(item.tokens))));
  if (ordered && start !== 1) node.start = start;
  return node;
}

function table({ header, rows, align }) {
  const row = (name, cells) => make("tr", ...cells.map((cell, i) => {
    const node = make(name, ...inline(cell.tokens));
    if (align[i]) node.style.textAlign = align[i];
    return node;
  }));
  const node = make("div", make("table", make("thead", row("th", header)), make("tbody", ...rows.map((cells) => row("td", cells)))));
  node.className = "table";
  return node;
}

function inline(tokens) {
  return tokens.map((token) => {
    switch (token.type) {
      case "strong":
      case "em":
      case "del":
        return make(token.type, ...inline(token.tokens));
      case "codespan":
        return make("code", token.text);
      case "br":
        return make("br");
      case "link":
      case "image":
        return link(token);
      case "escape":
        return token.text;
      default:
        return token.tokens ? make("span", ...inline(token.tokens)) : token.raw;
    }
  });
}

function link({ href, raw, tokens, text }) {
  if (!SAFE_LINK.test(href)) return raw;
  const node = make("a", ...(tokens?.length ? inline(tokens) : [text || href]));
  node.href = href;
  node.title = href;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return node;
}

function make(name, ...children) {
  const node = document.createElement(name);
  node.append(...children);
  return node;
}

// Makes a node's children like the fresh ones. Touches only what differs, so that a reader's
// selection stays while an answer grows.
export function patch(node, fresh) {
  fresh.forEach((wanted, i) => {
    const there = node.childNodes[i];
    if (there === undefined) node.append(wanted);
    else if (!alike(there, wanted)) there.replaceWith(wanted);
    else if (wanted.nodeType === Node.TEXT_NODE) growText(there, wanted.data);
    else patch(there, [...wanted.childNodes]);
  });
  while (node.childNodes.length > fresh.length) node.lastChild.remove();
}

function alike(a, b) {
  if (a.nodeName !== b.nodeName || a.attributes?.length !== b.attributes?.length) return false;
  return [...(a.attributes ?? [])].every(({ name, value }) => b.getAttribute(name) === value);
}

function growText(node, text) {
  if (node.data === text) return;
  if (text.startsWith(node.data)) node.appendData(text.slice(node.data.length));
  else node.data = text;
}
