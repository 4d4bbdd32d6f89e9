// The panel: what the engine does, as the statistics socket tells it.

import { Socket } from "./socket.js";

const WINDOW = 10_000;
const ROW = 12;
const GAP = 5;
const MIN_ROWS = 3;
const MAX_ROWS = 12;
const $ = (id) => document.getElementById(id);

export class Activity {
  // hueOf(responseId) is the hue of a conversation of this page, or null for another client's.
  constructor(hueOf) {
    this.hueOf = hueOf;
    this.lanes = new Map();
    this.rates = [];
    this.canvas = $("lanes");
    this.socket = new Socket("/v1/stats", {
      message: (event) => this.update(event),
      state: (state) => this.linkChanged(state),
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.wake());
    new ResizeObserver(() => this.wake()).observe(this.canvas);
  }

  linkChanged(state) {
    const link = $("stats-state");
    link.textContent = { open: "live", lost: "offline", connecting: "connecting" }[state];
    link.dataset.state = state;
  }

  update({ stats, connections, responses }) {
    const now = performance.now();
    this.rates.push([now, stats.generation_tokens]);
    while (this.rates.length > 2 && now - this.rates[0][0] > 1500) this.rates.shift();
    this.show(stats, connections);
    this.track(responses, now);
    this.wake();
  }

  show(stats, connections) {
    const [from, to] = [this.rates[0], this.rates.at(-1)];
    const seconds = (to[0] - from[0]) / 1000;
    const busy = stats.num_running > 0;
    const hits = stats.prefix_cache_queries ? stats.prefix_cache_hits / stats.prefix_cache_queries : 0;
    $("running").textContent = stats.num_running;
    $("waiting").textContent = stats.num_waiting;
    $("rate").textContent = busy && seconds > 0.15 ? Math.round((to[1] - from[1]) / seconds) : busy ? "…" : "0";
    $("step").textContent = busy ? `${(stats.last_step_time * 1000).toFixed(1)} ms` : "–";
    fill($("kv"), stats.kv_cache_usage);
    $("kv-value").textContent = `${stats.num_blocks - stats.num_free_blocks} of ${stats.num_blocks} blocks`;
    fill($("hits"), hits);
    $("hits-value").textContent = `${Math.round(100 * hits)} %`;
    $("generated").textContent = stats.generation_tokens.toLocaleString("en");
    $("finished").textContent = stats.num_finished;
    $("aborted").textContent = stats.num_aborted;
    $("connections").textContent = connections;
  }

  track(responses, now) {
    const seen = new Set();
    for (const { id, tokens } of responses) {
      seen.add(id);
      let lane = this.lanes.get(id);
      if (!lane) this.lanes.set(id, (lane = { row: this.freeRow(), from: now, marks: [], tokens: 0, to: null }));
      if (tokens && !lane.firstAt) lane.firstAt = now;
      if (tokens > lane.tokens) lane.marks.push([now, tokens - lane.tokens]);
      lane.tokens = tokens;
    }
    for (const [id, lane] of this.lanes) {
      if (!seen.has(id)) lane.to ??= now;
      if (lane.to && now - lane.to > WINDOW) this.lanes.delete(id);
    }
    const rows = Math.max(MIN_ROWS, ...[...this.lanes.values()].map((lane) => lane.row + 1));
    this.canvas.style.height = `${2 * GAP + rows * (ROW + GAP)}px`;
    const running = responses.length;
    this.canvas.setAttribute(
      "aria-label",
      running ? `${running} ${running === 1 ? "response is" : "responses are"} running` : "No response is running",
    );
  }

  freeRow() {
    const taken = new Set([...this.lanes.values()].map((lane) => (lane.to ? null : lane.row)));
    // Where an ended lane is still to be seen, another row is nicer, if there is one.
    const recent = new Set([...this.lanes.values()].map((lane) => lane.row));
    for (const avoid of [recent, taken]) {
      for (let row = 0; row < MAX_ROWS; row += 1) if (!avoid.has(row)) return row;
    }
    return MAX_ROWS - 1;
  }

  wake() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.draw();
      if (this.lanes.size) this.wake();
    });
  }

  draw() {
    const { canvas } = this;
    const scale = devicePixelRatio || 1;
    const { clientWidth: width, clientHeight: height } = canvas;
    if (canvas.width !== width * scale || canvas.height !== height * scale) {
      canvas.width = width * scale;
      canvas.height = height * scale;
    }
    const paint = canvas.getContext("2d");
    paint.setTransform(scale, 0, 0, scale, 0, 0);
    paint.clearRect(0, 0, width, height);
    const style = getComputedStyle(canvas);
    const now = performance.now();
    const x = (time) => width - ((now - time) / WINDOW) * width;
    paint.fillStyle = style.getPropertyValue("--line");
    paint.globalAlpha = 0.6;
    for (let second = 1; second < WINDOW / 1000; second += 1) {
      paint.fillRect(Math.round(width - (second * 1000 * width) / WINDOW), 0, 1, height);
    }
    paint.globalAlpha = 1;
    if (!this.lanes.size) this.drawEmpty(paint, style, width, height);
    const light = style.getPropertyValue("--lane-light").trim();
    for (const [id, lane] of this.lanes) this.drawLane(paint, lane, this.hueOf(id), light, x, now);
  }

  drawEmpty(paint, style, width, height) {
    const text = "Each answer becomes a lane here";
    paint.font = `13px ${style.getPropertyValue("--ui")}`;
    paint.textAlign = "center";
    const wide = paint.measureText(text).width + 24;
    paint.fillStyle = style.getPropertyValue("--surface");
    paint.fillRect((width - wide) / 2, height / 2 - 14, wide, 28);
    paint.fillStyle = style.getPropertyValue("--soft");
    paint.fillText(text, width / 2, height / 2 + 4);
  }

  drawLane(paint, lane, hue, light, x, now) {
    const y = 1.5 * GAP + lane.row * (ROW + GAP);
    const color = (alpha) => (hue === null ? `rgb(128 128 128 / ${alpha})` : `oklch(${light} 0.13 ${hue} / ${alpha})`);
    const end = lane.to ?? now;
    const bar = (from, to, alpha) => {
      paint.fillStyle = color(alpha);
      paint.beginPath();
      paint.roundRect(x(from), y, Math.max(2, x(to) - x(from)), ROW, 4);
      paint.fill();
    };
    bar(lane.from, end, 0.22);
    if (lane.firstAt) bar(lane.firstAt, end, 0.5);
    paint.fillStyle = color(1);
    for (const [time, count] of lane.marks) {
      const tall = Math.min(ROW, 3 + count * 1.5);
      paint.fillRect(x(time) - 1, y + (ROW - tall) / 2, 2, tall);
    }
  }
}

function fill(meter, share) {
  meter.ariaValueNow = Math.round(100 * share);
  meter.firstChild.style.width = `${100 * share}%`;
}
