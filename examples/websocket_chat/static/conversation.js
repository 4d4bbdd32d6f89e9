// One conversation: its messages, its socket, and the turn that is under way.

import { Socket } from "./socket.js";
import { run, schemas } from "./tools.js";

const MAX_ROUNDS = 4;

const FRIENDLY = {
  context_length_exceeded:
    "This conversation no longer fits into the model's context. Edit an earlier message, or start a new chat.",
  server_overloaded: "The engine's queue is full. Try again in a moment.",
};

export class Conversation {
  // changed(conversation, what) is called with "list", "messages", "text" or "state".
  constructor(saved, changed) {
    this.id = saved.id ?? `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;
    this.hue = saved.hue;
    this.system = saved.system ?? "";
    this.temperature = saved.temperature ?? 0.6;
    this.tools = saved.tools ?? false;
    this.messages = saved.messages ?? [];
    this.draft = "";
    this.changed = changed;
    this.turn = null;
    this.lately = [];
    this.connection = "connecting";
    this.socket = new Socket("/v1/responses", {
      message: (event) => this.receive(event),
      state: (state, detail) => this.connectionChanged(state, detail),
    });
  }

  get title() {
    return this.messages.find((message) => message.role === "user")?.text ?? "New chat";
  }

  // Whether a response of the running batch is one of this conversation's.
  knows(responseId) {
    return this.lately.includes(responseId);
  }

  toJSON() {
    const { id, hue, system, temperature, tools } = this;
    const messages = this.messages.map(({ role, text, reasoning, calls, note, metrics }) => ({
      role, text, reasoning, calls, note, metrics,
    }));
    return { id, hue, system, temperature, tools, messages };
  }

  // --- turns ---

  ask(text) {
    this.messages.push({ role: "user", text });
    this.answer();
  }

  regenerate() {
    if (this.turn || !this.messages.length) return;
    if (this.messages.at(-1).role === "assistant") this.messages.pop();
    this.answer();
  }

  edit(index, text) {
    if (this.turn) return;
    this.messages.length = index;
    this.ask(text);
  }

  stop() {
    if (this.turn?.responseId && this.socket.isOpen) this.socket.send({ type: "response.cancel" });
  }

  answer() {
    const message = { role: "assistant", text: "" };
    this.messages.push(message);
    this.turn = { message, sentAt: performance.now(), frames: 0, firstAt: null, responseId: null, calls: new Map() };
    this.changed(this, "messages");
    this.changed(this, "list");
    this.socket.whenOpen(() => this.turn && this.request());
  }

  // What the server of this connection knows already need not be sent again.
  request(whole = false) {
    const asked = this.messages.slice(0, -1);
    let known = -1;
    if (!whole) {
      known = asked.findLastIndex(
        (message) => message.responseId && message.connection === this.socket.number,
      );
    }
    this.turn.sentAt = performance.now();
    this.turn.usedPrevious = known >= 0;
    this.socket.send({
      type: "response.create",
      previous_response_id: known >= 0 ? asked[known].responseId : null,
      instructions: this.system.trim() || null,
      temperature: this.temperature,
      ...(this.tools && { tools: schemas }),
      input: [...(known >= 0 ? outputs(asked[known]) : []), ...asked.slice(known + 1).flatMap(items)],
    });
  }

  // --- events ---

  receive(event) {
    if (event.type === "error") return this.refused(event.error);
    const turn = this.turn;
    if (!turn) return;
    switch (event.type) {
      case "response.created":
        turn.responseId = event.response.id;
        this.lately = [event.response.id, ...this.lately.slice(0, 7)];
        this.changed(this, "state");
        break;
      case "response.output_text.delta":
        turn.message.text += event.delta;
        this.grown();
        break;
      case "response.reasoning_text.delta":
      case "response.reasoning_summary_text.delta":
        turn.message.reasoning = (turn.message.reasoning ?? "") + event.delta;
        this.grown();
        break;
      case "response.output_item.added":
      case "response.output_item.done":
        if (event.item.type === "function_call") this.called(event);
        break;
      case "response.function_call_arguments.delta":
        turn.calls.get(event.output_index).arguments += event.delta;
        this.grown();
        break;
      case "response.completed":
      case "response.incomplete":
        turn.message.responseId = event.response.id;
        turn.message.connection = this.socket.number;
        turn.message.metrics = this.finalMetrics(turn, event.response);
        this.finish({ cancelled: "Stopped", incomplete: "Cut off: the context is full" }[event.response.status]);
        if (event.response.status === "completed") this.makeCalls();
        break;
      case "response.failed":
        this.finish(event.response.error.message, true);
    }
  }

  grown() {
    const { turn } = this;
    turn.firstAt ??= performance.now();
    turn.lastAt = performance.now();
    turn.frames += 1;
    turn.message.metrics = this.liveMetrics(turn);
    this.changed(this, "text");
  }

  // A call begins, or is whole. Only a whole one is ever made.
  called({ type, output_index: index, item }) {
    let call = this.turn.calls.get(index);
    if (!call) {
      call = { id: item.call_id, name: item.name, arguments: "" };
      this.turn.calls.set(index, call);
      (this.turn.message.calls ??= []).push(call);
    }
    if (type === "response.output_item.done" && item.status !== "incomplete") {
      Object.assign(call, { arguments: item.arguments, whole: true });
    }
    this.changed(this, "text");
  }

  // Makes the calls of the last answer, and asks for the next one.
  makeCalls() {
    const { calls } = this.messages.at(-1);
    if (!this.tools || !calls?.length || !calls.every((call) => call.whole)) return;
    for (const call of calls) call.output = run(call);
    const asked = this.messages.findLastIndex(({ role }) => role === "user");
    if (this.messages.length - 1 - asked < MAX_ROUNDS) this.answer();
    else this.changed(this, "messages");
  }

  refused(error) {
    if (error.code === "previous_response_not_found" && this.turn?.usedPrevious) {
      this.request(true);
    } else if (this.turn && error.code !== "response_not_in_flight") {
      this.finish(FRIENDLY[error.code] ?? error.message, true);
    }
  }

  finish(note, failed = false) {
    const { message } = this.turn;
    this.turn = null;
    message.note = note ?? null;
    message.failed = failed;
    this.changed(this, "messages");
    this.changed(this, "list");
  }

  connectionChanged(state, detail) {
    this.connection = state;
    this.lost = detail ?? null;
    // A turn that was not sent yet goes out when there is a connection again.
    if (state === "lost" && this.turn?.responseId) this.finish("Interrupted: the connection was lost", true);
    this.changed(this, "state");
  }

  liveMetrics(turn) {
    const seconds = (turn.lastAt - turn.firstAt) / 1000;
    return {
      ttft: (turn.firstAt - turn.sentAt) / 1000,
      rate: seconds > 0.2 ? (turn.frames - 1) / seconds : null,
      tokens: turn.frames,
      live: true,
    };
  }

  finalMetrics(turn, { usage }) {
    const live = turn.firstAt ? this.liveMetrics(turn) : {};
    const seconds = turn.firstAt ? (turn.lastAt - turn.firstAt) / 1000 : 0;
    return {
      ttft: live.ttft ?? null,
      rate: seconds > 0 ? (usage.output_tokens - 1) / seconds : null,
      tokens: usage.output_tokens,
      prompt: usage.input_tokens,
      cached: usage.input_tokens_details.cached_tokens,
    };
  }

  close() {
    this.socket.close();
  }
}

// A message as items of the protocol. The thoughts stay here: a model makes new ones.
function items(message) {
  const { role, text, calls = [] } = message;
  const whole = calls.filter((call) => call.whole);
  return [
    ...(text ? [{ role, content: text }] : []),
    ...whole.map(({ id, name, arguments: given }) => ({ type: "function_call", call_id: id, name, arguments: given })),
    ...outputs(message),
  ];
}

function outputs({ calls = [] }) {
  return calls
    .filter(({ output }) => output !== undefined)
    .map(({ id, output }) => ({ type: "function_call_output", call_id: id, output }));
}
