// Drives the chat page in Chromium: node chat_page.mjs SCENARIO URL PLAYWRIGHT_DIR CHROMIUM OUT
// Talks to the test in lines: prints what happened, reads a line where the test has to act.

import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import assert from "node:assert/strict";

const [scenario, url, playwright, chromiumPath, out] = process.argv.slice(2);
const { chromium } = createRequire(`${playwright}/`)("playwright-core");
const input = createInterface({ input: process.stdin })[Symbol.asyncIterator]();

const say = (value) => console.log(JSON.stringify(value));
const hear = async () => (await input.next()).value;

async function open(browser, options = {}) {
  const context = await browser.newContext(options);
  return openIn(context);
}

async function openIn(context) {
  const page = await context.newPage();
  page.setDefaultTimeout(60_000);
  page.failures = [];
  page.on("pageerror", (error) => page.failures.push(error.message));
  await page.goto(url);
  await page.waitForSelector("#stats-state[data-state=open]", { state: "attached" });
  return page;
}

async function ask(page, text) {
  await page.fill("#prompt", text);
  await page.keyboard.press("Enter");
}

const answer = (page) => page.locator(".message.assistant").last();
const started = (page) => page.waitForFunction(() => [...document.querySelectorAll(".assistant .text")].at(-1)?.textContent.length > 10);
const ended = (page) => page.waitForSelector("#send:not([hidden])");

const scenarios = {
  async interleave(browser) {
    const context = await browser.newContext();
    const order = [];
    const pages = [];
    for (const name of ["a", "b"]) {
      const page = await openIn(context);
      page.on("websocket", () => {});
      await page.exposeFunction("note", () => order.push(name));
      await page.evaluate(() => {
        new MutationObserver(() => window.note()).observe(document.querySelector("#messages"), { subtree: true, characterData: true });
      });
      pages.push(page);
    }
    await Promise.all(pages.map((page, i) => ask(page, `${i + 1}`)));
    await Promise.all(pages.map(ended));
    const switches = order.filter((name, i) => i && order[i - 1] !== name).length;
    say({ switches, texts: await Promise.all(pages.map((page) => answer(page).locator(".text").textContent())) });
  },

  async stop(browser) {
    const page = await open(browser);
    await ask(page, "1");
    await started(page);
    await page.click("#stop");
    await ended(page);
    const note = await answer(page).locator(".note").textContent();
    await ask(page, "2");
    await started(page);
    await page.keyboard.press("Escape");
    await ended(page);
    say({ note, again: await answer(page).locator(".note").textContent() });
  },

  async reload(browser) {
    const page = await open(browser);
    await ask(page, "1");
    await started(page);
    say("running");
    await hear();
    await page.reload();
    await page.waitForSelector("#stats-state[data-state=open]", { state: "attached" });
    await page.locator(".conversation", { hasText: "1" }).click();
    say({ note: await answer(page).locator(".note").textContent() });
    await hear();
  },

  async script(browser) {
    const page = await open(browser);
    await ask(page, "1");
    await ended(page);
    const text = await answer(page).locator(".text").textContent();
    const elements = await page.locator("#messages script, #messages b, #messages img, #conversations script").count();
    say({ text, elements, ran: await page.evaluate(() => window.ran ?? null), failures: page.failures });
  },

  async data(browser) {
    const page = await open(browser);
    await ask(page, "1");
    await ended(page);
    const result = await page.evaluate(() => {
      const parts = [...document.querySelectorAll(".assistant .text > *")];
      const mono = (node) => getComputedStyle(node).fontFamily.includes("monospace");
      return {
        parts: parts.map((part) => [part.localName, (part.querySelector("code") ?? part).textContent]),
        mono: parts.every((part) => mono(part.querySelector("pre code") ?? part) === (part.className === "code")),
      };
    });
    say({ ...result, failures: page.failures });
  },

  async markdown(browser) {
    const context = await browser.newContext({ permissions: ["clipboard-read", "clipboard-write"] });
    const page = await openIn(context);
    const requests = [];
    page.on("request", (request) => requests.push(request.url()));
    await page.fill("#prompt", "1");
    await page.evaluate(() => {
      const found = (name) => document.querySelector(`.assistant ${name}`);
      const look = () => {
        window.heading ??= found("h3");
        if (found("blockquote")) window.kept ??= window.heading.isConnected;
      };
      new MutationObserver(look).observe(document.querySelector("#messages"), { subtree: true, childList: true });
    });
    await page.keyboard.press("Enter");
    await page.waitForSelector(".assistant .text blockquote");
    const html = () => answer(page).locator(".text").innerHTML();
    const kept = await page.evaluate(() => window.kept);
    await ended(page);
    const [first, pasted] = [await html(), () => page.evaluate(() => navigator.clipboard.readText())];
    await page.click(".copy");
    const code = await pasted();
    await page.click(".foot-tools button:first-child");
    const whole = await pasted();
    await page.reload();
    await page.waitForSelector(".assistant .text blockquote");
    say({ html: first, again: await html(), code, whole, kept, requests: requests.filter((to) => !to.startsWith(url)), ran: await page.evaluate(() => window.ran ?? null), failures: page.failures });
  },

  async storage(browser) {
    const context = await browser.newContext();
    const pages = [];
    for (const text of ["of the first tab", "of the second tab"]) {
      const page = await openIn(context);
      await ask(page, text);
      await ended(page);
      pages.push(page);
    }
    const [page] = pages;
    const titles = () => page.locator(".conversation").allTextContents();
    await page.reload();
    const reloaded = await page.textContent("#title");
    await page.click("#new-chat");
    const both = await titles();
    const count = () => page.evaluate(() => Object.keys(localStorage).length);
    for (let i = 0; i < 3; i++) {
      await page.evaluate(() => document.querySelector("#many").click());
      await page.waitForFunction(() => !document.querySelector("#conversations [data-state=running]"));
    }
    await page.reload();
    await page.evaluate(() => document.querySelector("#many").click());
    await page.waitForFunction(() => !document.querySelector("#conversations [data-state=running]"));
    const most = await count();
    page.on("dialog", (dialog) => dialog.accept());
    await page.click("#forget");
    const forgotten = await titles();
    const left = await count();
    await page.addInitScript(() => {
      for (const name of ["localStorage", "sessionStorage"]) {
        Object.defineProperty(window, name, { get() { throw new DOMException("denied", "SecurityError"); } });
      }
    });
    await page.reload();
    await ask(page, "without storage");
    await ended(page);
    say({ reloaded, both, most, forgotten, left, refused: await page.textContent("#title"), failures: page.failures });
  },

  async empty(browser) {
    const problems = [];
    for (const [width, height] of [[360, 640], [360, 800], [1280, 860], [1280, 720], [1920, 1080]]) {
      const page = await open(browser, { viewport: { width, height }, isMobile: width < 400 });
      await page.click("#show-settings");
      for (const selector of ["html", "#prompt", "#system", "#conversations", "#activity", ".settings"]) {
        const over = await page.evaluate((selector) => {
          const node = document.querySelector(selector);
          return [node.scrollHeight - node.clientHeight, node.scrollWidth - node.clientWidth];
        }, selector);
        if (over[0] > 0 || over[1] > 0) problems.push(`${width} x ${height}: ${selector} ${over}`);
      }
      await page.click("#show-settings");
      const over = await page.evaluate(() => document.querySelector("#scroll").scrollHeight - document.querySelector("#scroll").clientHeight);
      if (over > 0) problems.push(`${width} x ${height}: #scroll ${over}`);
      await page.context().close();
    }
    say(problems);
  },

  async tools(browser) {
    const results = [];
    for (const colorScheme of ["light", "dark"]) {
      for (const [name, viewport] of [["desktop", { width: 1360, height: 860 }], ["phone", { width: 390, height: 844 }]]) {
        const phone = name === "phone";
        const page = await open(browser, { colorScheme, viewport, isMobile: phone, hasTouch: phone, deviceScaleFactor: phone ? 2 : 1 });
        await page.click("#show-settings");
        await page.check("#tools");
        await page.click("#show-settings");
        await ask(page, "What is 12 + 30?");
        await page.waitForFunction(() => document.querySelector(".thoughts summary")?.textContent === "Thinking…");
        say("thinking");
        await page.waitForFunction(() => document.querySelectorAll(".assistant").length === 2);
        await ended(page);
        const shown = await page.evaluate(() => {
          const texts = (within, selector) => [...within.querySelectorAll(selector)].filter((node) => !node.hidden).map((node) => node.textContent);
          return {
            thoughts: [...document.querySelectorAll(".thoughts:not([hidden])")].map((node) => [node.open, ...texts(node, "*")]),
            calls: [...document.querySelectorAll(".call")].map((node) => texts(node, "code, .call-state, pre")),
            texts: texts(document, ".assistant .text"),
            elements: document.querySelectorAll("#messages img, #messages b").length,
            mono: [...document.querySelectorAll(".call pre, .call code")].every((node) => getComputedStyle(node).fontFamily.includes("monospace")),
          };
        });
        await page.locator(".thoughts summary").first().click();
        await page.screenshot({ path: `${out}/tools-${name}-${colorScheme}.png` });
        const problems = [...(await page.evaluate(inspect)), ...page.failures];
        // A conversation is kept with its calls.
        await page.reload();
        await page.waitForSelector("#stats-state[data-state=open]", { state: "attached" });
        if (phone) await page.tap("#show-rail");
        await page.locator(".conversation", { hasText: "12 + 30" }).click();
        results.push({ ...shown, problems, kept: await page.locator(".call").count() });
        await page.context().close();
      }
    }
    say(results);
  },

  async phone(browser) {
    // So narrow that the buttons have a line of their own.
    const page = await open(browser, { viewport: { width: 320, height: 640 }, isMobile: true, hasTouch: true });
    await ask(page, "1");
    await started(page);
    await ask(page, "2");
    const hint = await page.textContent("#hint");
    const kept = await page.inputValue("#prompt");
    const asked = await page.locator(".message.user").count();
    await page.tap("#stop");
    await ended(page);
    const after = await page.textContent("#hint");
    // Where the text of a node begins.
    const left = (node) => node.getBoundingClientRect().left + parseFloat(getComputedStyle(node).paddingLeft);
    const note = await answer(page).locator(".note").evaluate(left);
    const tools = await answer(page).locator(".foot-tools button").first().evaluate(left);
    await page.focus("#prompt");
    await page.keyboard.press("Enter");
    await started(page);
    const sent = await page.locator(".message.user .text").last().textContent();
    await page.tap("#stop");
    await ended(page);
    const drawers = [];
    for (const name of ["rail", "activity"]) {
      await page.tap(`#show-${name}`);
      const focused = await page.evaluate(() => document.activeElement.ariaLabel);
      await page.tap(`#${name} .close`);
      await page.waitForSelector(`#${name}`, { state: "hidden" });
      drawers.push({ focused, ...(await page.evaluate(() => ({ left: document.activeElement.id, open: document.body.dataset.drawer ?? null }))) });
    }
    say({ hint, kept, asked, after, note, tools, sent, drawers, failures: page.failures });
  },

  async lost(browser) {
    const page = await open(browser);
    await ask(page, "1");
    await started(page);
    say("running");
    await hear();
    await page.waitForSelector("#banner:not([hidden])");
    const banner = await page.textContent("#banner");
    const note = await answer(page).locator(".note").textContent();
    const offline = await page.textContent("#stats-state");
    say("lost");
    await hear();
    await page.waitForSelector("#banner", { state: "hidden" });
    await page.waitForSelector("#stats-state[data-state=open]", { state: "attached" });
    await page.getByRole("button", { name: "Regenerate" }).click();
    await ended(page);
    say({ banner, note, offline, text: await answer(page).locator(".text").textContent() });
  },

  async talk(browser) {
    const page = await open(browser, { viewport: { width: 1360, height: 860 } });
    const sent = [];
    page.on("websocket", () => {});
    const tap = await page.context().newCDPSession(page);
    await tap.send("Network.enable");
    tap.on("Network.webSocketFrameSent", ({ response }) => sent.push(JSON.parse(response.payloadData)));
    await page.getByRole("button", { name: "Settings of this chat" }).click();
    await page.getByLabel("System prompt").fill("You are friendly, and you answer in one or two short sentences.");
    await page.getByLabel("Temperature").fill("0");
    await page.getByRole("button", { name: "Settings of this chat" }).click();
    await ask(page, "Hello, my name is Tom.");
    await ended(page);
    const first = await answer(page).locator(".text").textContent();
    await ask(page, "What is my name?");
    await ended(page);
    const second = await answer(page).locator(".text").textContent();
    const metrics = await answer(page).locator(".metrics").textContent();
    await page.getByRole("button", { name: "Regenerate" }).click();
    await ended(page);
    const again = await answer(page).locator(".text").textContent();
    await page.locator(".message.user").first().hover();
    await page.getByRole("button", { name: "Edit" }).first().click();
    await page.getByLabel("Edit your message").fill("Hello, my name is Anna.");
    await page.keyboard.press("Enter");
    await page.waitForFunction(() => document.querySelectorAll(".message").length === 2);
    await ended(page);
    say({ first, second, again, metrics, sent, failures: page.failures, count: await page.locator(".message").count() });
  },

  async look(browser) {
    const problems = [];
    for (const colorScheme of ["light", "dark"]) {
      for (const [name, viewport] of [["desktop", { width: 1360, height: 860 }], ["phone", { width: 390, height: 844 }]]) {
        const phone = name === "phone";
        const page = await open(browser, { colorScheme, viewport, isMobile: phone, hasTouch: phone, deviceScaleFactor: phone ? 2 : 1 });
        await ask(page, "Hello!");
        await ended(page);
        await page.waitForFunction(() => document.querySelector("#step").textContent === "–" && Number(document.querySelector("#finished").textContent));
        const low = await page.evaluate(() => document.querySelector("#lanes").clientHeight);
        if (phone) await page.tap("#show-rail");
        await page.click("#many");
        await started(page);
        // Not for six to run at once: that moment may pass between two looks.
        await page.waitForFunction(() => document.querySelector("#lanes").clientHeight >= 6 * 17);
        const high = await page.evaluate(() => document.querySelector("#lanes").clientHeight);
        if (low > 70 || high < 6 * 17) problems.push(`lanes ${low} px high for one, ${high} px for seven`);
        await page.screenshot({ path: `${out}/${name}-${colorScheme}.png` });
        if (phone) {
          await page.tap("#show-activity");
          await page.waitForTimeout(300);
          await page.screenshot({ path: `${out}/${name}-${colorScheme}-activity.png` });
        }
        problems.push(...(await page.evaluate(inspect)).map((problem) => `${name} ${colorScheme}: ${problem}`), ...page.failures);
        await page.context().close();
      }
    }
    say({ problems });
  },

  async keyboard(browser) {
    const page = await open(browser, { viewport: { width: 1360, height: 860 } });
    await page.keyboard.press("Tab");
    const skip = await page.evaluate(() => document.activeElement.className);
    await page.keyboard.press("Enter");
    await page.keyboard.type("Hello!");
    await page.keyboard.press("Shift+Enter");
    await page.keyboard.type("Who are you?");
    const typed = await page.inputValue("#prompt");
    await page.keyboard.press("Enter");
    await ended(page);
    await page.keyboard.press("Alt+n");
    const empty = await page.locator(".message").count();
    const focused = await page.evaluate(() => document.activeElement.id);
    say({ skip, typed, empty, focused, announced: await page.textContent("#announce") });
  },
};

// Runs in the page: what a reader would stumble over.
function inspect() {
  const problems = [];
  if (document.documentElement.scrollWidth > innerWidth) problems.push("scrolls sideways");
  for (const control of document.querySelectorAll("button, textarea, input")) {
    const name = control.textContent.trim() || control.ariaLabel || control.labels?.[0]?.textContent.trim();
    if (!name) problems.push(`without a name: ${control.outerHTML.slice(0, 80)}`);
  }
  const tops = [...document.querySelectorAll(".numbers dd")].map((node) => node.getBoundingClientRect().top);
  if (tops[0] !== tops[1] || tops[2] !== tops[3]) problems.push(`numbers off their rows: ${tops}`);
  const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const style = getComputedStyle(document.documentElement);
  const luminance = (name) => {
    paint.fillStyle = style.getPropertyValue(name);
    paint.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...paint.getImageData(0, 0, 1, 1).data].map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  for (const [text, ground] of [["--ink", "--surface"], ["--ink", "--paper"], ["--soft", "--surface"], ["--soft", "--paper"], ["--soft", "--sunk"], ["--on-accent", "--accent"], ["--alarm", "--alarm-sunk"], ["--alarm", "--surface"]]) {
    const [a, b] = [luminance(text), luminance(ground)].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) problems.push(`contrast of ${text} on ${ground}: ${((a + 0.05) / (b + 0.05)).toFixed(2)}`);
  }
  return problems;
}

const browser = await chromium.launch({
  executablePath: chromiumPath,
  args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"],
});
try {
  assert(scenarios[scenario], `no such scenario: ${scenario}`);
  await scenarios[scenario](browser);
} finally {
  await browser.close();
}
process.exit(0);
