// The page in a real browser, as somebody uses it; each case is told as a line of JSON.
//
//     node drive.mjs URL

import chromium from "@sparticuz/chromium";
import axe from "axe-core";
import assert from "node:assert";
import { chromium as playwright } from "playwright-core";

const [url] = process.argv.slice(2);
const WAIT = { timeout: 60_000 };
const LONG = Array.from({ length: 120 }, (_, i) => `word${i}`).join(" ");
const CODE = "Use **json.dumps**:\n\n```python\nimport json\nprint(json.dumps({\"a\": 1}))\n```\n\n| from | to |\n|---|---|\n| dict | object |";
const say = (words, what) => `${what} [[say ${words}]]`;

const browser = await playwright.launch({
  executablePath: await chromium.executablePath(),
  args: chromium.args.filter((flag) => flag !== "--single-process"), // a closed tab would end it
  headless: true,
});
const foreign = []; // what was asked of anybody else
const faults = []; // what the page complained of

async function open(options = {}) {
  const context = await browser.newContext({ viewport: { width: 1200, height: 760 }, ...options });
  const page = await context.newPage();
  page.on("request", (request) => {
    if (!request.url().startsWith(url) && !request.url().startsWith("data:")) foreign.push(request.url());
  });
  page.on("pageerror", (error) => faults.push(String(error)));
  page.on("console", (message) => {
    if (message.type() === "error") faults.push(message.text());
  });
  await page.goto(url);
  return page;
}

async function ask(page, words) {
  await page.locator("#question").fill(words);
  await page.locator("#question").press("Enter");
}

const done = (page) => page.locator("#send").waitFor(WAIT);
const last = (page) => page.locator("#messages > li").last();

async function audit(page, where) {
  await page.evaluate(axe.source);
  const { violations } = await page.evaluate(() => globalThis.axe.run());
  const serious = violations.filter(({ impact }) => ["serious", "critical"].includes(impact));
  assert.deepEqual(serious.map(({ id, nodes }) => `${where}: ${id} ${nodes[0].html}`), []);
}

const page = await open();
const cases = {
  async sends_and_streams() {
    await ask(page, say(CODE, "What does json.dumps do?"));
    await page.locator(".growing").waitFor(WAIT);
    await done(page);
    assert.match(await last(page).locator("pre code").textContent(), /json\.dumps/);
    assert.equal(await last(page).locator("table td").count(), 2);
    assert.equal(await last(page).locator(".reasoning summary").textContent(), "Thought");
    assert.match(await last(page).locator(".told").textContent(), /first token after \d+ ms.*tokens\/s/);
  },
  async a_second_turn_shows_cached_tokens() {
    await ask(page, say("It reads JSON", "And json.loads?"));
    await done(page);
    const told = await last(page).locator(".told").textContent();
    const [, asked, cached] = told.match(/(\d+) prompt tokens, (\d+) cached/).map(Number);
    assert(cached > 0 && cached <= asked, told);
  },
  async stops() {
    await ask(page, say(LONG, "Say much."));
    await page.locator(".growing", { hasText: "word3" }).waitFor(WAIT);
    await page.locator("#stop").click();
    await done(page);
    assert.match(await last(page).locator(".told").textContent(), /stopped/);
    assert.doesNotMatch(await last(page).textContent(), /word119/);
  },
  async edits_and_regenerates() {
    const before = await page.locator("#messages > li").count();
    await page.locator("#messages > li.user").last().getByRole("button", { name: "Edit" }).click();
    await page.locator(".edit textarea, #messages textarea").first().fill(say("edited", "Say little."));
    await page.keyboard.press("Control+Enter");
    await done(page);
    assert.equal(await page.locator("#messages > li").count(), before);
    assert.match(await last(page).locator(".said").textContent(), /edited/);
    await last(page).getByRole("button", { name: "Regenerate" }).click();
    await done(page);
    assert.match(await last(page).locator(".said").textContent(), /edited/);
  },
  async live_view_follows_a_running_answer() {
    await ask(page, say(LONG, "Say much again."));
    await page.keyboard.press("Alt+l");
    const lane = page.locator("#live .lanes li", { hasText: "decoding" }).first();
    await lane.waitFor(WAIT);
    const answered = async () => Number((await lane.textContent()).match(/(\d+) generated/)[1]);
    const first = await answered();
    await page.waitForFunction((least) => {
      const told = document.querySelector("#live .lanes")?.textContent.match(/(\d+) generated/);
      return told && Number(told[1]) > least;
    }, first, WAIT);
    assert.match(await page.locator("#live").textContent(), /restored \d+ times/);
    await audit(page, "live");
    await page.locator("#live .lanes", { hasNotText: "decoding" }).waitFor(WAIT);
    await page.keyboard.press("Alt+l");
    await done(page);
  },
  async conversations_stay_in_the_browser() {
    await page.reload();
    await page.locator("#conversations button").nth(1).click();
    assert.match(await page.locator("#messages").textContent(), /json\.dumps/);
    await page.getByRole("button", { name: "New", exact: true }).click();
    assert.equal(await page.locator("#messages > li").count(), 0);
  },
  async tabs_keep_each_others_conversations() {
    const other = await page.context().newPage();
    await other.goto(url);
    await ask(other, say("from the other tab", "Other tab"));
    await done(other);
    await page.locator("#conversations button", { hasText: "Other tab" }).waitFor(WAIT);
    await page.getByRole("button", { name: "New", exact: true }).click();
    await ask(page, say("from this tab", "This tab"));
    await done(page);
    await other.locator("#conversations button", { hasText: "This tab" }).waitFor(WAIT);
    await other.locator("#delete").click();
    await page.locator("#conversations button", { hasText: "Other tab" }).waitFor({ state: "detached", ...WAIT });
    await other.close();
    await page.reload();
    const kept = await page.locator("#conversations").textContent();
    assert.match(kept, /This tab/);
    assert.doesNotMatch(kept, /Other tab/);
  },
  async an_answer_elsewhere_gives_the_buttons_back() {
    await page.locator("#conversations button", { hasText: "This tab" }).click();
    await page.getByRole("button", { name: "New", exact: true }).click();
    await ask(page, say(LONG, "Long beside another."));
    await page.locator(".growing").waitFor(WAIT);
    await page.locator("#conversations button", { hasText: "This tab" }).click();
    assert.equal(await page.getByRole("button", { name: "Edit" }).count(), 0);
    await done(page);
    assert.equal(await page.getByRole("button", { name: "Edit" }).count(), 1);
  },
  async an_answer_that_failed_is_not_sent_back() {
    await page.getByRole("button", { name: "New", exact: true }).click();
    await page.route("**/v1/chat/completions", (route) => route.abort(), { times: 1 });
    await ask(page, say("never", "Fails."));
    await page.locator("#messages .wrong").waitFor(WAIT);
    faults.splice(0); // the browser tells of it too
    const asked = page.waitForRequest("**/v1/chat/completions");
    await ask(page, say("at last", "Again."));
    const { messages } = (await asked).postDataJSON();
    assert.deepEqual(messages.map(({ role }) => role), ["user", "user"]);
    await done(page);
    assert.match(await last(page).textContent(), /at last/);
  },
  async what_an_earlier_page_kept_is_taken_up() {
    const earlier = await open();
    await earlier.evaluate(() => {
      const messages = [{ role: "user", content: "Kept long ago" }];
      const all = ["one", "two"].map((id) => ({ id, title: `From earlier: ${id}`, messages }));
      localStorage.setItem("luceasync.conversations", JSON.stringify(all));
    });
    for (const _ of [1, 2]) { // once is enough, twice changes nothing
      await earlier.reload();
      const titles = await earlier.locator("#conversations button").allTextContents();
      assert.deepEqual(titles.filter((title) => /From earlier/.test(title)).map((title) => title.trim().slice(-3)), ["one", "two"]);
    }
    await earlier.context().close();
  },
  async works_where_nothing_may_be_kept() {
    const context = await browser.newContext();
    await context.addInitScript(() => {
      for (const name of ["localStorage", "sessionStorage"]) {
        Object.defineProperty(window, name, { get() { throw new DOMException("no", "SecurityError"); } });
      }
    });
    const bare = await context.newPage();
    await bare.goto(url);
    await ask(bare, say("kept nowhere", "Hello"));
    await done(bare);
    assert.match(await last(bare).textContent(), /kept nowhere/);
    assert.match(await bare.locator("#notice").textContent(), /store anything/);
    await context.close();
  },
  async works_on_a_phone_in_the_dark_and_by_keyboard() {
    const phone = await open({ viewport: { width: 390, height: 760 }, colorScheme: "dark" });
    await phone.keyboard.press("Tab"); // the link that skips to the question
    await phone.keyboard.press("Enter");
    await phone.keyboard.type(say("Hello from a phone", "Hello"));
    await phone.keyboard.press("Enter");
    await done(phone);
    assert.match(await last(phone).textContent(), /Hello from a phone/);
    assert(await phone.evaluate(() => document.documentElement.scrollWidth <= innerWidth));
    await audit(phone, "phone, dark");
    await phone.context().close();
  },
  async nothing_serious_is_found() {
    await audit(page, "chat");
  },
  async nobody_else_is_asked_and_nothing_is_refused() {
    assert.deepEqual(foreign, []);
    assert.deepEqual(faults, []);
  },
};

for (const [name, run] of Object.entries(cases)) {
  let error = null;
  try {
    await run();
  } catch (raised) {
    error = String(raised.stack ?? raised).slice(0, 1200);
  }
  console.log(JSON.stringify({ case: name, error }));
}
await browser.close();
