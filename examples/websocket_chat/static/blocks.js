// Which lines of an answer are data: a tool call, JSON, or what stands between fences.

const KINDS = [
  { opens: /^\s*<tool_call>/, closes: /<\/tool_call>/ },
  { opens: /^\s*```/, closes: /^\s*```\s*$/, fenced: true },
  { opens: /^\s*(\{\s*(["}]|$)|\[\s*(["{[\]]|$))/ },
];

// [{tag: "p" | "pre", text}], at least one; their texts make up the whole again.
export function split(text) {
  const parts = [];
  let kind = null;
  let depth = 0;
  for (const line of text.match(/[^\n]*\n|[^\n]+$/g) ?? [""]) {
    const opened = kind === null;
    kind ??= KINDS.find(({ opens }) => opens.test(line)) ?? null;
    const tag = kind ? "pre" : "p";
    if (parts.at(-1)?.tag === tag && !(kind && opened)) parts.at(-1).text += line;
    else parts.push({ tag, text: line });
    if (!kind) continue;
    // JSON ends where its brackets do, or at an empty line if they never do.
    if (!kind.closes) depth += brackets(line);
    const ends = kind.closes ? kind.closes.test(line) && !(kind.fenced && opened) : depth <= 0 || !line.trim();
    if (ends) [kind, depth] = [null, 0];
  }
  return parts;
}

// Brackets that a line opens, less those that it closes; not those in strings.
function brackets(line) {
  const bare = line.replace(/"(\\.|[^"\\])*"?/g, "");
  return bare.replace(/[^{[]/g, "").length - bare.replace(/[^}\]]/g, "").length;
}
