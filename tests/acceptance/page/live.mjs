// The live view in a real browser; each case is told as a line of JSON.
//
//     node live.mjs URL

import assert from "node:assert";
import { WAIT, answered, ask, audit, begin, done, faults, foreign, front, open, run, say } from "./harness.mjs";

const [server] = process.argv.slice(2);
const { url, own } = await front(server);
const LONG = Array.from({ length: 200 }, (_, i) => `word${i}`).join(" ");
const page = await open(url);
const live = page.locator("#live");
const section = (title, of = page) => of.locator("#live section", { has: of.locator("h3", { hasText: title }) });
const watched = (isOn) => page.locator(`#watch[aria-pressed=${isOn}]`).waitFor(WAIT);

/** Status events in place of the server's. */
const told = (statuses) => async (request, response) => {
  request.resume();
  response.writeHead(200, { "content-type": "text/event-stream" });
  for (const status of statuses) response.write(`event: status\ndata: ${JSON.stringify(status)}\n\n`);
};

await run({
  async lanes_show_what_was_cached_and_what_is_written() {
    await answered(page, say("one", "A title of my own"));
    await begin(page);
    await ask(page, say(LONG, "Say much."));
    await page.keyboard.press("Alt+l");
    await watched(true);
    const lane = section("Lanes").locator("li", { hasText: "writing" });
    await lane.waitFor(WAIT);
    assert.match(await lane.textContent(), /“Say much\..*” writing · [\d,]+ of [\d,]+ tokens read/);
    const written = () => lane.locator(".written").evaluate((node) => node.getBoundingClientRect().width);
    const first = await written();
    await page.waitForFunction((least) => document.querySelector("#live .lanes .written").getBoundingClientRect().width > least, first, WAIT);
    assert(await lane.locator(".computed").count());
    await page.keyboard.press("Alt+l");
    await done(page);
    await ask(page, say(LONG, "And more."));
    await page.keyboard.press("Alt+l");
    await page.waitForFunction(() => document.querySelector("#live .lanes .cached")?.getBoundingClientRect().width > 1, null, WAIT);
    assert.match(await section("Lanes").locator("li", { hasText: "writing" }).textContent(), /taken up from memory/);
  },
  async charts_follow() {
    assert.equal(await live.locator(".charts figure canvas").count(), 4);
    await page.waitForFunction(() => Number(document.querySelector("#live .charts b").textContent) > 0, null, WAIT);
    const captions = await live.locator(".charts figcaption").allTextContents();
    assert.match(captions.join(), /Writing, tokens\/s.*Reading prompts.*running.*waiting.*cached.*accepted/);
  },
  async answers_say_why_they_took_so_long_and_stay_unfolded() {
    await page.keyboard.press("Alt+l");
    await done(page);
    await page.keyboard.press("Alt+l");
    const row = section("Last answers").locator("li").first();
    await row.getByText("Say much").first().waitFor(WAIT);
    await section("Last answers").locator("details").first().locator("summary").click();
    const words = section("Last answers").locator("details[open]");
    assert.match(await words.textContent(), /% of the time went into writing the answer.*of the prompt were (taken up|computed).*were written at/);
    assert(await words.locator(".bar .decode").count());
    await page.waitForTimeout(1500); // three statuses
    assert.equal(await words.count(), 1);
  },
  async the_prefix_tree_is_drawn_to_scale_with_its_owners() {
    const rows = section("Kept prefixes").locator(".tree > li");
    await rows.first().waitFor(WAIT);
    assert.match(await section("Kept prefixes").textContent(), /prompts? went on from memory: [\d,]+ tokens were not computed again/);
    assert.match((await rows.allTextContents()).join(), /“A title of my own.*used (yet|\d+×) · .*tokens [\d,]+ to [\d,]+ · .*[MK]iB/);
    await page.waitForFunction(() => /on disk/.test(document.querySelector("#live section:has(.tree) h3").textContent), null, WAIT);
  },
  async chains_are_one_row_and_branches_begin_where_their_parent_ends() {
    const status = await (await fetch(`${server}/status`)).json();
    const node = (key, parent, begin, end, more = {}) => ({ key, parent, begin, end, num_bytes: { memory: 1 << 20 }, has_state: true, hits: 2, idle_s: 90, conversation: null, ...more });
    const nodes = [node("a", null, 0, 256), node("b", "a", 256, 512), node("c", "b", 512, 1024, { num_bytes: { disk: 1 << 21 } }), node("d", "b", 512, 768, { conversation: "00000000", hits: 0 })];
    const live = { lanes: [], waiting: [{ prompt_tokens: 900, waiting_s: 3, conversation: null }], nodes, num_nodes: 4, device_parts: { "cuda:0": { weights: 3e9, lanes: 1e9, free_before: 8e9 } }, recent: [] };
    const processes = [{ name: "stage 1", devices: ["cuda:1"], detail: "", num_starts: 2, resident_bytes: 1 << 30, node_bytes: 0 }, { name: "drafter", devices: ["cpu"], detail: "restarting", num_starts: 1, resident_bytes: 0, node_bytes: 0 }];
    const experts = { distinct_total: 4000, hits_total: 3000, misses_total: 900, read_through_total: 100, num_bytes_total: 3 << 29 };
    own.set("/status/events", told([{ ...status, num_queued: 1, reasons: ["--parallel 3: so many fit"], experts, processes, live }]));
    const other = await open(url);
    await other.keyboard.press("Alt+l");
    const rows = other.locator("#live .tree > li");
    await other.waitForFunction(() => document.querySelectorAll("#live .tree > li").length === 3, null, { ...WAIT, polling: 200 });
    assert.equal(await rows.count(), 3);
    const ends = await rows.evaluateAll((all) => all.map((row) => {
      const [first] = row.querySelectorAll(".track > span");
      const track = row.querySelector(".track").getBoundingClientRect();
      const { left, width } = first.getBoundingClientRect();
      return { left: (left - track.left) / track.width, width: width / track.width, text: row.textContent };
    }));
    const near = (one, value) => assert(Math.abs(one - value) < 0.02, `${one}, not ${value}`);
    near(ends[0].width, 0.5);
    for (const { left } of ends.slice(1)) near(left, 0.5);
    assert.match(ends[0].text, /2 nodes/);
    assert(ends.some(({ text }) => /Another client's conversation.*not used yet/.test(text)));
    const text = await other.locator("#live").textContent();
    assert.match(text, /Waiting, because all lanes are taken.*900 tokens, waiting for 3\.0 s/);
    assert.match(text, /weights 2\.8 GiB.*keys, values and states 954 MiB.*3\.7 GiB more were free/);
    assert.match(text, /Expertsin slots.*in a slot 75\.0 %copied to a slot 22\.5 %read in host memory 2\.5 %4,000 met.*1\.5 GiB copied or read/);
    assert.match(text, /stage 1works on cuda:1 · 1\.0 GiB · started 2 times.*drafterrestarting/);
    assert.match(text, /Why these sizes--parallel 3: so many fit/);
    await audit(other, "live, light");
    await other.emulateMedia({ colorScheme: "dark" });
    await audit(other, "live, dark");
    await other.context().close();
    own.delete("/status/events");
  },
  async works_on_a_phone() {
    const phone = await open(url, { viewport: { width: 390, height: 760 }, hasTouch: true, isMobile: true });
    await phone.locator("#watch").click();
    await phone.locator("#live .tree > li").first().waitFor(WAIT);
    assert(await phone.evaluate(() => document.documentElement.scrollWidth <= innerWidth));
    await audit(phone, "live, phone");
    await phone.context().close();
  },
  async a_lost_server_is_told_and_found_again() {
    own.set("/status/events", (request, response) => response.destroy());
    const other = await open(url);
    await other.keyboard.press("Alt+l");
    await other.locator("#live .wrong", { hasText: /cannot be reached/ }).waitFor(WAIT);
    own.delete("/status/events");
    await other.locator("#live .lanes li").first().waitFor(WAIT);
    assert.equal(await other.locator("#live .wrong").isVisible(), false);
    await other.context().close();
    faults.splice(0); // the browser tells of it too
  },
  async nobody_else_is_asked_and_nothing_is_refused() {
    assert.deepEqual(foreign, []);
    assert.deepEqual(faults, []);
  },
});
