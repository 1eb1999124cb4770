// A conversation of 200 turns and a tree of 2,000 nodes: how long the page's frames take.
//
//     node large.mjs URL

import assert from "node:assert";
import { WAIT, done, faults, front, open, paced, run } from "./harness.mjs";

const [server] = process.argv.slice(2);
const { url, own } = await front(server);
const TURN = [
  "Some **bold** text with `code`, a [link](https://example.com) and $x^2$.", "| a | b |\n|---|---|\n| 1 | 2 |",
  "```python\n# a comment\ndef f(x):\n    return [y * 2 for y in x if y > 3]\n```", "- one\n- two\n  - three", "A longer paragraph. ".repeat(20),
].join("\n\n");
const MOST_MEDIAN_MS = 34; // two frames of 60 a second

/** What `act` costs: intervals of frames, and time in which the page could not answer. */
async function measured(page, act) {
  await page.evaluate(() => {
    globalThis.frames = [];
    globalThis.blocked = [];
    globalThis.observer = new PerformanceObserver((list) => blocked.push(...list.getEntries().map(({ duration }) => duration)));
    observer.observe({ entryTypes: ["longtask"] });
    let last = performance.now();
    const frame = (now) => {
      frames.push(now - last);
      last = now;
      globalThis.running = requestAnimationFrame(frame);
    };
    globalThis.running = requestAnimationFrame(frame);
  });
  await act();
  return page.evaluate(() => {
    cancelAnimationFrame(running);
    observer.disconnect();
    const sorted = frames.slice(2).sort((one, other) => one - other);
    const at = (share) => Math.round(sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))]);
    return { frames: sorted.length, median_ms: at(0.5), p95_ms: at(0.95), longest_ms: at(1), tasks_over_50_ms: blocked.length, longest_task_ms: Math.round(Math.max(0, ...blocked)) };
  });
}

/** Put a conversation of `num` turns into the browser. */
function seed(page, num, content) {
  return page.evaluate(({ num: count, content: text }) => new Promise((resolve, reject) => {
    const messages = {};
    let parent = null;
    for (let i = 0; i < 2 * count; i += 1) {
      const role = i % 2 ? "assistant" : "user";
      messages[`m${i}`] = { id: `m${i}`, parent, role, content: i % 2 ? text : `Question ${i}` };
      parent = `m${i}`;
    }
    const request = indexedDB.open("luceasync", 1);
    request.onerror = reject;
    request.onsuccess = () => {
      const put = request.result.transaction("conversations", "readwrite").objectStore("conversations");
      put.put({ id: "long", title: "Long", system: "", messages, head: parent, savedAt: Date.now() }).onsuccess = resolve;
    };
  }), { num, content });
}

function tree(num) {
  const nodes = [];
  let random = 1;
  const draw = (end) => (random = (random * 48271) % 2147483647) % end;
  for (let i = 0; i < num; i += 1) {
    const parent = i ? nodes[Math.max(0, i - 1 - draw(3) * draw(40))] : null;
    const begin = parent ? parent.end : 0;
    nodes.push({ key: `n${i}`, parent: parent?.key ?? null, begin, end: begin + 64 * (1 + draw(4)), num_bytes: i % 3 ? { memory: 1e6 } : { memory: 1e6, disk: 2e6 }, has_state: true, hits: draw(9), idle_s: draw(4000), conversation: i % 40 ? null : "0000000a" });
  }
  return nodes;
}

const page = await open(url);

await run({
  async a_conversation_of_200_turns_opens_scrolls_and_streams() {
    await seed(page, 200, TURN);
    await page.reload();
    const figures = {};
    await page.locator("#conversations .open").click({ trial: true });
    figures.opened_ms = await page.evaluate(async () => {
      const begun = performance.now();
      document.querySelector("#conversations .open").click();
      await new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)));
      return Math.round(performance.now() - begun);
    });
    assert.equal(await page.locator("#messages > li").count(), 400);
    figures.scrolling = await measured(page, async () => {
      for (let i = 0; i < 40; i += 1) {
        await page.mouse.move(600, 300);
        await page.mouse.wheel(0, i < 30 ? -1500 : 900);
        await page.waitForTimeout(40);
      }
    });
    const words = Array.from({ length: 400 }, (_, i) => ({ content: i % 20 ? `word${i} ` : `\n\n\`\`\`js\nlet x${i} = "${i}";\n\`\`\`\n\n` }));
    own.set("/v1/chat/completions", paced(words, 10));
    await page.locator("#question").fill("On");
    figures.streaming = await measured(page, async () => {
      await page.keyboard.press("Enter");
      await page.locator(".said", { hasText: "word399" }).waitFor(WAIT);
      await done(page);
    });
    own.delete("/v1/chat/completions");
    for (const { median_ms } of [figures.scrolling, figures.streaming]) assert(median_ms <= MOST_MEDIAN_MS, JSON.stringify(figures));
    return figures;
  },
  async a_tree_of_2000_nodes_is_drawn_and_scrolled() {
    const status = await (await fetch(`${server}/status`)).json();
    const live = { lanes: [], waiting: [], nodes: tree(2000), num_nodes: 2000, device_parts: {}, recent: [] };
    own.set("/status/events", (request, response) => {
      request.resume();
      response.writeHead(200, { "content-type": "text/event-stream" });
      const timer = setInterval(() => {
        for (const node of live.nodes) node.idle_s += 0.5;
        response.write(`data: ${JSON.stringify({ ...status, live })}\n\n`);
      }, 500);
      response.on("close", () => clearInterval(timer));
    });
    await page.keyboard.press("Alt+l");
    await page.locator("#live .tree > li").first().waitFor(WAIT);
    assert.equal(await page.locator("#live .tree > li").count(), 200);
    await page.getByRole("button", { name: /^Show .* more$/ }).click();
    const rows = await page.locator("#live .tree > li").count();
    assert(rows > 500);
    const watching = await measured(page, () => page.waitForTimeout(6000));
    const scrolling = await measured(page, async () => {
      for (let i = 0; i < 60; i += 1) {
        await page.mouse.move(600, 500);
        await page.mouse.wheel(0, 400);
        await page.waitForTimeout(40);
      }
    });
    own.delete("/status/events");
    for (const { median_ms } of [watching, scrolling]) assert(median_ms <= MOST_MEDIAN_MS, JSON.stringify({ watching, scrolling }));
    return { rows, watching, scrolling };
  },
  async nothing_is_refused() {
    assert.deepEqual(faults, []);
  },
});
