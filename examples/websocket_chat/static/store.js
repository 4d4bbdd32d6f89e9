// Conversations in the browser's own storage, a key each, so that tabs do not overwrite one
// another's. Where the browser refuses storage, the page works and forgets.

const PREFIX = "asyncllm-conversation-";
const OPEN = "asyncllm-open";
const MAX_KEPT = 20;

export function load() {
  return tryStorage(() => keys().map(read).filter(Boolean).sort((a, b) => a.at - b.at).map(({ saved }) => saved)) ?? [];
}

export function save(conversation) {
  const own = PREFIX + conversation.id;
  const text = JSON.stringify({ at: Date.now(), saved: conversation });
  tryStorage(() => {
    const others = keys().filter((key) => key !== own).map((key) => ({ key, at: read(key)?.at ?? 0 }));
    others.sort((a, b) => a.at - b.at);
    while (others.length >= MAX_KEPT) localStorage.removeItem(others.shift().key);
    for (;;) {
      try {
        return localStorage.setItem(own, text);
      } catch (error) {
        if (!others.length) throw error;
        localStorage.removeItem(others.shift().key); // the storage is full
      }
    }
  });
}

export function forget(id) {
  tryStorage(() => localStorage.removeItem(PREFIX + id));
}

// Which conversation this tab shows, for a reload.
export function setOpen(id) {
  tryStorage(() => sessionStorage.setItem(OPEN, id));
}

export function getOpen() {
  return tryStorage(() => sessionStorage.getItem(OPEN));
}

function keys() {
  return Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
}

// What another program of this origin wrote there is dropped.
function read(key) {
  try {
    const found = JSON.parse(localStorage.getItem(key));
    if (Array.isArray(found.saved.messages) && Number.isFinite(found.at)) return found;
  } catch {
    // falls through
  }
  localStorage.removeItem(key);
  return null;
}

function tryStorage(action) {
  try {
    return action();
  } catch (error) {
    console.warn("conversations are not kept:", error.message);
    return null;
  }
}
