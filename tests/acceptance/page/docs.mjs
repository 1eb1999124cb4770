// The page at /docs in a real browser: folds, forms, answers as they come, light, dark and narrow.

import assert from "node:assert";
import { audit, browser, faults, foreign, run, WAIT, watch } from "./harness.mjs";

const url = process.argv[2];
const CHAT = "#post_v1_chat_completions";

async function docs(options = {}, hash = "") {
  const context = await browser.newContext({ viewport: { width: 1100, height: 800 }, ...options });
  const page = await context.newPage();
  watch(page, url);
  await page.goto(`${url}/docs${hash}`);
  await page.locator("details").first().waitFor(WAIT);
  return page;
}

/** Sends the form of an operation, and waits for its end. */
async function sent(page, fold) {
  await page.locator(`${fold} [type=submit]`).click();
  await page.locator(`${fold} output`, { hasText: " ms" }).waitFor(WAIT);
  return [await page.locator(`${fold} output`).textContent(), await page.locator(`${fold} pre`).textContent()];
}

await run({
  async chat_streams() {
    const page = await docs({}, CHAT);
    const [told, text] = await sent(page, CHAT);
    assert(told.startsWith("200"), told);
    assert(text.startsWith("data: {") && text.trimEnd().endsWith("data: [DONE]"), text.slice(0, 200));
  },
  async the_model_is_named_in_examples() {
    const page = await docs({}, "#post_api_chat");
    await page.waitForFunction(() => !document.querySelector("#post_api_chat textarea").value.includes('"MODEL"'));
    const [told, text] = await sent(page, "#post_api_chat");
    assert(told.startsWith("200") && JSON.parse(text.trimEnd().split("\n").at(-1)).done, told);
  },
  async an_error_is_shown() {
    const page = await docs({}, CHAT);
    await page.locator(`${CHAT} textarea`).fill('{"messages": [], "temperature": 9}');
    const [told, text] = await sent(page, CHAT);
    assert(told.startsWith("400") && JSON.parse(text).error.message, text);
  },
  async a_page_is_read_and_a_stream_is_stopped() {
    const page = await docs({}, "#get_status");
    assert(JSON.parse((await sent(page, "#get_status"))[1]).ready);
    const events = "#get_status_events";
    await page.locator(`${events} summary`).click();
    await page.locator(`${events} [type=submit]`).click();
    await page.locator(`${events} pre`, { hasText: "event: status" }).waitFor(WAIT);
    await page.locator(`${events} .stop`).click();
    await page.locator(`${events} output`, { hasText: "stopped" }).waitFor(WAIT);
  },
  async words_find_operations() {
    const page = await docs();
    const all = await page.locator("details:visible").count();
    await page.locator("#find").fill("tokens");
    const some = await page.locator("details:visible").count();
    assert(some > 0 && some < all / 3, `${some} of ${all}`);
  },
  async light_dark_and_narrow_are_accessible() {
    for (const colorScheme of ["light", "dark"]) {
      for (const width of [1100, 390]) {
        const page = await docs({ colorScheme, viewport: { width, height: 800 } }, CHAT);
        await audit(page, `${colorScheme} ${width}`);
        const overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
        assert(overflow <= 0, `${overflow} px beyond ${width}`);
        if (process.env.SHOTS) await page.screenshot({ path: `${process.env.SHOTS}/docs-${colorScheme}-${width}.png` });
      }
    }
  },
  async nothing_went_elsewhere_and_nothing_failed() {
    assert.deepEqual(foreign, []);
    assert.deepEqual(faults.filter((fault) => !/status of 400/.test(fault)), []);
  },
});

await browser.close();
