// Pictures of the page, while a server answers with the bundled model.
//
//     node shots.mjs URL FOLDER

import { WAIT, answered, begin, browser, open } from "./harness.mjs";

const [url, folder] = process.argv.slice(2);
const QUESTIONS = ["What does json.dumps do?", "What does json.loads do?", "What does os.path.join do?", "What does heapq.heappush do?"];
const LONG = "List what is in the module os. Which module is each from?";
const WIDE = { viewport: { width: 1200, height: 760 } };
const NARROW = { viewport: { width: 390, height: 760 }, deviceScaleFactor: 2 };
const shoot = (page, name) => page.screenshot({ path: `${folder}/page-${name}.png` });

/** Set the temperature to 0: the same pictures each time. */
async function greedy(page) {
  await page.keyboard.press("Alt+s");
  await page.getByLabel("Temperature").fill("0");
  await page.keyboard.press("Escape");
}

// Other clients, until `seen` resolves: an answer may be too short to be seen in the live view.
async function keepBusy(page, seen, name) {
  let isSeen = false;
  seen.then(() => { isSeen = true; }, () => { isSeen = true; });
  for (let i = 0; !isSeen; i += 1) {
    const messages = [{ role: "user", content: `${LONG} ${name} ${i}` }, { role: "assistant", content: "os.path, os.walk. ".repeat(20) }, { role: "user", content: QUESTIONS[i % 4] }];
    await page.request.post(`${url}/v1/chat/completions`, { data: { messages, max_tokens: 400, prompt_cache_key: name, ignore_eos: true }, timeout: WAIT.timeout });
  }
}

const page = await open(url, WIDE);
await shoot(page, "empty");
await greedy(page);
await answered(page, QUESTIONS[3]);
await begin(page);
await answered(page, QUESTIONS[2]);
await begin(page);
await answered(page, QUESTIONS[0]);
await answered(page, QUESTIONS[1]);
await page.locator(".figures summary").last().click();
await page.locator("#messages").evaluate((list) => { list.scrollTop = list.scrollHeight; });
await shoot(page, "chat");

await page.keyboard.press("Alt+l");
const running = page.locator("#live .lanes li", { hasText: "writing" });
const seen = running.nth(1).waitFor(WAIT).then(() => page.waitForTimeout(6000)).then(() => running.nth(1).waitFor(WAIT)).then(async () => {
  await shoot(page, "live");
  await page.locator("#live section").nth(1).evaluate((node) => node.scrollIntoView());
  await shoot(page, "prefixes");
});
await Promise.all([seen, ...["agent-1", "agent-2", "agent-3"].map((name) => keepBusy(page, seen, name))]);

const phone = await open(url, { ...NARROW, colorScheme: "dark", hasTouch: true, isMobile: true });
await answered(phone, QUESTIONS[1]);
await shoot(phone, "phone");
await browser.close();
process.exit(0);
