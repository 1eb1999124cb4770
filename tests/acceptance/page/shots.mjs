// Pictures of the page, while a server answers with the bundled model.
//
//     node shots.mjs URL FOLDER

import chromium from "@sparticuz/chromium";
import { chromium as playwright } from "playwright-core";

const [url, folder] = process.argv.slice(2);
const QUESTIONS = ["What does json.dumps do?", "What does json.loads do?", "What does os.path.join do?"];

const browser = await playwright.launch({
  executablePath: await chromium.executablePath(),
  args: chromium.args.filter((flag) => flag !== "--single-process"),
  headless: true,
});

async function open(options) {
  const page = await (await browser.newContext(options)).newPage();
  await page.goto(url);
  return page;
}

// Ask, and wait for the end of the answer, which is the page's `place`th.
async function ask(page, question, place) {
  await page.locator("#question").fill(question);
  await page.keyboard.press("Enter");
  await page.getByRole("button", { name: "Regenerate" }).nth(place).waitFor({ timeout: 60_000 });
}

// Other clients, until `seen` resolves: an answer may be too short to be seen in the live view.
async function keepBusy(page, seen) {
  let isSeen = false;
  seen.then(() => { isSeen = true; }, () => { isSeen = true; });
  while (!isSeen) {
    const body = { messages: [{ role: "user", content: QUESTIONS[0] }] };
    await page.request.post(`${url}/v1/chat/completions`, { data: body });
  }
}

const page = await open({ viewport: { width: 1100, height: 700 } });
await ask(page, QUESTIONS[0], 0);
await ask(page, QUESTIONS[1], 1);
await page.screenshot({ path: `${folder}/page-chat.png` });
await ask(page, QUESTIONS[2], 2);
await page.keyboard.press("Alt+l");
const running = page.locator("#live .lanes li", { hasText: "generated" });
const shot = running.first().waitFor({ timeout: 60_000 })
  .then(() => page.screenshot({ path: `${folder}/page-live.png` }));
await Promise.all([shot, keepBusy(page, shot), keepBusy(page, shot), keepBusy(page, shot)]);
const phone = await open({ viewport: { width: 390, height: 700 }, colorScheme: "dark" });
await ask(phone, QUESTIONS[0], 0);
await phone.screenshot({ path: `${folder}/page-phone.png` });
await browser.close();
