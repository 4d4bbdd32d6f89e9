// Which lines of an answer are data that no fence marks: a tool call, or JSON. The rest is Markdown.

const FENCE = /^\s{0,3}(```+|~~~+)/;
const TOOL_CALL = { opens: /^\s*<tool_call>/, closes: /<\/tool_call>/ };
const JSON_VALUE = { opens: /^\s*(\{\s*(["}]|$)|\[\s*(["{[\]]|$))/ };

// [{data, text}], at least one; their texts make up the whole again.
export function split(text) {
  const parts = [];
  let kind = null;
  let fence = null;
  let depth = 0;
  for (const line of text.match(/[^\n]*\n|[^\n]+$/g) ?? [""]) {
    const opened = kind === null;
    if (opened && !fence) kind = [TOOL_CALL, JSON_VALUE].find(({ opens }) => opens.test(line)) ?? null;
    if (!kind) fence = fenceAfter(fence, line);
    const data = Boolean(kind);
    if (parts.at(-1)?.data === data && !(data && opened)) parts.at(-1).text += line;
    else parts.push({ data, text: line });
    if (!kind) continue;
    // JSON ends where its brackets do, or at an empty line if they never do.
    if (kind === JSON_VALUE) depth += brackets(line);
    const ends = kind === JSON_VALUE ? depth <= 0 || !line.trim() : kind.closes.test(line);
    if (ends) [kind, depth] = [null, 0];
  }
  return parts;
}

// The open fence after a line: one is closed by as many of its characters, and nothing else.
function fenceAfter(fence, line) {
  if (!fence) return FENCE.exec(line)?.[1] ?? null;
  const marks = line.trim();
  const closes = marks.length >= fence.length && marks === fence[0].repeat(marks.length);
  return closes ? null : fence;
}

// Brackets that a line opens, less those that it closes; not those in strings.
function brackets(line) {
  const bare = line.replace(/"(\\.|[^"\\])*"?/g, "");
  return bare.replace(/[^{[]/g, "").length - bare.replace(/[^}\]]/g, "").length;
}
