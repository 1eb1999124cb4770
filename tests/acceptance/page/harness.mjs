// A browser, pages, and a server before the real one that may answer in its place.

import chromium from "@sparticuz/chromium";
import axe from "axe-core";
import assert from "node:assert";
import http from "node:http";
import { chromium as playwright } from "playwright-core";

export const WAIT = { timeout: 60_000 };
export const say = (words, what) => `${what} [[say ${words}]]`;

export const browser = await playwright.launch({
  executablePath: await chromium.executablePath(),
  args: chromium.args.filter((flag) => flag !== "--single-process"), // a closed tab would end it
  headless: true,
});
export const foreign = []; // what was asked of anybody else
export const faults = []; // what the page complained of

/**
 * Forwards to the server at `url`, but for the paths of `own`: functions of request and response.
 * @returns {Promise<{url: string, own: Map<string, Function>, close: () => void}>}
 */
export async function front(url) {
  const own = new Map();
  const there = new URL(url);
  const server = http.createServer((request, response) => {
    const answer = own.get(request.url);
    if (answer) return void answer(request, response);
    const options = { agent: false, host: there.hostname, port: there.port, method: request.method, path: request.url, headers: { ...request.headers, host: there.host, origin: url } };
    const forwarded = http.request(options, (found) => {
      response.writeHead(found.statusCode, found.headers);
      found.on("error", () => response.destroy());
      found.pipe(response);
    });
    forwarded.on("error", () => response.destroy());
    response.on("close", () => forwarded.destroy());
    request.pipe(forwarded);
  });
  await new Promise((done) => server.listen(0, "127.0.0.1", done));
  return { url: `http://127.0.0.1:${server.address().port}`, own, close: () => server.closeAllConnections?.() ?? server.close() };
}

/** An answer of chat completions that says `deltas`, one after the other; an element that is a function is waited for. */
export function paced(deltas, pauseMs = 15) {
  return async (request, response) => {
    request.resume();
    response.writeHead(200, { "content-type": "text/event-stream" });
    const event = (data) => response.write(`data: ${data}\n\n`);
    for (const delta of deltas) {
      if (typeof delta === "function") { await delta(); continue; }
      if (response.destroyed) return;
      event(JSON.stringify({ choices: [{ index: 0, delta, finish_reason: null }] }));
      await new Promise((done) => setTimeout(done, pauseMs));
    }
    event(JSON.stringify({ choices: [{ index: 0, delta: {}, finish_reason: "stop" }] }));
    event("[DONE]");
    response.end();
  };
}

/** A new browser context with the page at `url`. */
export async function open(url, options = {}) {
  const context = await browser.newContext({ viewport: { width: 1200, height: 760 }, locale: "en-US", ...options });
  // Routes switch the browser's cache off: on a busy disk, reading from it after a 304 may hang.
  await context.route("**/nowhere", (route) => route.continue());
  const page = await context.newPage();
  watch(page, url);
  await page.goto(url);
  await page.locator("#server.well").waitFor({ state: "attached", ...WAIT });
  return page;
}

export function watch(page, url) {
  page.on("request", (request) => {
    if (!/^(data|blob):/.test(request.url()) && !request.url().startsWith(url)) foreign.push(request.url());
  });
  page.on("pageerror", (error) => faults.push(String(error)));
  page.on("console", (message) => {
    if (message.type() === "error") faults.push(message.text());
  });
}

export async function ask(page, words) {
  await page.locator("#question").fill(words);
  await page.locator("#question").press("Enter");
}

/** Ask, and wait for the end of the answer. */
export async function answered(page, words) {
  const before = await page.locator("#messages > li").count();
  await ask(page, words);
  await page.locator("#messages > li").nth(before + 1).waitFor(WAIT);
  await done(page);
  return last(page);
}

export const done = (page) => page.locator("#send").waitFor(WAIT);
export const last = (page) => page.locator("#messages > li").last();
export const begin = (page) => page.locator("#new").click();

/** Raise if axe-core finds something serious. */
export async function audit(page, where) {
  await page.evaluate(axe.source);
  const { violations } = await page.evaluate(() => globalThis.axe.run());
  const serious = violations.filter(({ impact }) => ["serious", "critical"].includes(impact));
  assert.deepEqual(serious.map(({ id, nodes }) => `${where}: ${id} ${nodes[0].html} ${nodes[0].failureSummary}`), []);
}

/** Run each case, and tell it as a line of JSON; what it returns are its figures. */
export async function run(cases) {
  const only = process.env.ONLY_CASE; // for whoever writes one
  for (const [name, act] of Object.entries(cases)) {
    if (only && !name.match(only)) continue;
    let error = null;
    let figures = null;
    try {
      figures = (await act()) ?? null;
    } catch (raised) {
      error = String(raised.stack ?? raised).slice(0, 1500);
    }
    console.log(JSON.stringify({ case: name, error, figures }));
  }
  await browser.close();
  process.exit(0); // servers of fronts may still listen
}
