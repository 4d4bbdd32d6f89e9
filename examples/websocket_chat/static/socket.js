// A WebSocket that comes back by itself. Every connection has a number: what the server knew
// about an earlier one is gone with it.

const FIRST_DELAY = 500;
const LONGEST_DELAY = 8000;

function protocols() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!token) return [];
  const bytes = new TextEncoder().encode(token);
  const base64 = btoa(String.fromCharCode(...bytes));
  const encoded = base64.replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  return ["asyncllm", `bearer.${encoded}`];
}

export class Socket {
  // on: {message(event), state("open" | "lost" | "connecting", detail)}
  constructor(path, on) {
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    this.url = `${scheme}://${location.host}${path}`;
    this.on = on;
    this.number = 0;
    this.delay = FIRST_DELAY;
    this.closed = false;
    this.waiting = [];
    this.connect();
  }

  get isOpen() {
    return this.socket?.readyState === WebSocket.OPEN;
  }

  connect() {
    clearTimeout(this.timer);
    this.on.state("connecting");
    const socket = (this.socket = new WebSocket(this.url, protocols()));
    socket.onopen = () => {
      this.number += 1;
      this.delay = FIRST_DELAY;
      this.on.state("open");
      const waiting = this.waiting;
      this.waiting = [];
      for (const resume of waiting) resume();
    };
    socket.onmessage = (message) => this.on.message(JSON.parse(message.data));
    socket.onclose = (event) => {
      if (socket !== this.socket || this.closed) return;
      const delay = this.delay;
      this.delay = Math.min(2 * delay, LONGEST_DELAY);
      this.on.state("lost", { delay, code: event.code, reason: event.reason });
      this.timer = setTimeout(() => this.connect(), delay);
    };
  }

  // Calls back when there is a connection: at once, or after the next one was made.
  whenOpen(callback) {
    if (this.isOpen) callback();
    else {
      this.waiting.push(callback);
      if (this.socket.readyState === WebSocket.CLOSED) this.connect();
    }
  }

  send(event) {
    this.socket.send(JSON.stringify(event));
  }

  close() {
    this.closed = true;
    clearTimeout(this.timer);
    this.socket.close(1000);
  }
}
