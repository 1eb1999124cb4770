// Pictures of the page, while a server answers with the bundled model.
//
//     node shots.mjs URL FOLDER

import chromium from "@sparticuz/chromium";
import { chromium as playwright } from "playwright-core";

const [url, folder] = process.argv.slice(2);
const QUESTIONS = ["What does json.dumps do?", "How do I read it back?", "What does os.path.join do?"];

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

async function ask(page, question) {
  await page.locator("#question").fill(question);
  await page.keyboard.press("Enter");
}

const page = await open({ viewport: { width: 1100, height: 700 } });
for (const question of QUESTIONS.slice(0, 2)) {
  await ask(page, question);
  await page.locator("#send").waitFor({ timeout: 60_000 });
}
await page.screenshot({ path: `${folder}/page-chat.png` });
await ask(page, QUESTIONS[2]);
await page.keyboard.press("Alt+l");
await page.locator("#live .lanes li", { hasText: "answered" }).first().waitFor({ timeout: 60_000 });
await page.screenshot({ path: `${folder}/page-live.png` });
const phone = await open({ viewport: { width: 390, height: 700 }, colorScheme: "dark" });
await ask(phone, QUESTIONS[0]);
await phone.locator("#send").waitFor({ timeout: 60_000 });
await phone.screenshot({ path: `${folder}/page-phone.png` });
await browser.close();
