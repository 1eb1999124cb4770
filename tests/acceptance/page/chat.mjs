// The chat in a real browser, as somebody uses it; each case is told as a line of JSON.
//
//     node chat.mjs URL

import assert from "node:assert";
import { readFile } from "node:fs/promises";
import { WAIT, answered, ask, audit, begin, browser, done, faults, foreign, front, last, open, paced, run, say, watch } from "./harness.mjs";

const [server] = process.argv.slice(2);
const { url, own } = await front(server);
const CHAT = "/v1/chat/completions";
const LONG = Array.from({ length: 120 }, (_, i) => `word${i}`).join(" ");
const MARKDOWN = [
  "Use **json.dumps**:", "```python\nimport json\nprint(json.dumps({\"a\": 1}))\n```", "| from | to |\n|:--|--:|\n| dict | object |",
  "- [x] done\n- [ ] open", "First line\nsecond line", "A fact[^1] and $e^{i\\pi} = -1$, 5$ or 6$.", "$$\n\\int_0^1 x^2\\,dx\n$$",
  "![A cat](https://example.com/cat.png) <b onclick=alert(1)>bold</b> [bad](javascript:alert(1)) H<sub>2</sub>O", "[^1]: Its source.",
].join("\n\n");

const page = await open(url);
const nextBody = async (act) => {
  const asked = page.waitForRequest(`**${CHAT}`);
  await act();
  return (await asked).postDataJSON();
};
/** What is kept of the conversation of this title: the text of each message. */
const stored = (tab, title) => tab.evaluate(async (title) => {
  const asked = (request) => new Promise((resolve) => { request.onsuccess = () => resolve(request.result); });
  const database = await asked(indexedDB.open("luceasync"));
  const all = await asked(database.transaction("conversations").objectStore("conversations").getAll());
  database.close();
  return Object.values(all.find((each) => each.title === title).messages).map(({ content }) => content.trim());
}, title);
const poll = async (found, isEnough) => {
  for (let i = 0; i < 200; i += 1) {
    const now = await found();
    if (isEnough(now)) return now;
    await new Promise((done) => setTimeout(done, 50));
  }
  return found();
};
const titles = () => page.locator("#conversations .open").allTextContents();
const menu = async (item) => {
  await page.locator("#more").click();
  await page.getByRole("menuitem", { name: item, exact: true }).click();
};
const settings = async (act) => {
  await page.keyboard.press("Alt+s");
  await act(page.locator("#settings"));
  await page.keyboard.press("Escape");
};

await run({
  async the_empty_page_says_what_the_model_is_and_begins_with_one_click() {
    assert.match(await page.locator("#empty p").first().textContent(), /tokens of context/);
    assert.equal(await page.evaluate(() => document.activeElement.id), "question");
    await audit(page, "empty");
    const body = await nextBody(() => page.locator(".starter").first().click());
    await done(page);
    assert.equal(body.messages.length, 1);
    assert.match(await last(page).locator(".said").textContent(), /A few words/);
  },
  async markdown_is_drawn_and_nothing_in_it_acts() {
    const answer = await answered(page, say(MARKDOWN, "Show me all."));
    assert.equal(await answer.locator(".code > div span").textContent(), "python");
    assert(await answer.locator("code .hljs-keyword").count());
    assert.equal(await answer.locator("td.to-right").count(), 1);
    assert.equal(await answer.locator("li.task input:checked").count(), 1);
    assert.equal(await answer.locator("p br").count(), 1);
    assert.equal(await answer.locator(".footnotes li").count(), 1);
    await answer.locator(".math.drawn .katex").nth(1).waitFor(WAIT);
    assert.equal(await answer.locator("span.math").count(), 1); // not the money
    assert.equal(await answer.locator("sub").textContent(), "2");
    assert.equal(await answer.locator("img, script, b, [onclick]").count(), 0);
    assert.match(await answer.textContent(), /<b onclick=alert\(1\)>/);
    assert.equal(await answer.getByRole("link", { name: "A cat (image)" }).getAttribute("href"), "https://example.com/cat.png");
    assert.equal(await answer.locator("a[href^=javascript]").count(), 0);
    assert.match(await answer.locator(".thinking summary").textContent(), /^Thought/);
    await audit(page, "markdown");
  },
  async code_and_answers_are_copied() {
    await page.context().grantPermissions(["clipboard-read", "clipboard-write"]);
    const copied = () => page.evaluate(() => navigator.clipboard.readText());
    await last(page).getByRole("button", { name: "Copy", exact: true }).first().click();
    assert.equal(await copied(), "import json\nprint(json.dumps({\"a\": 1}))");
    await last(page).locator(".acts").getByRole("button", { name: "Copy" }).click();
    assert.equal(await copied(), MARKDOWN);
    await page.evaluate(() => {
      navigator.clipboard.writeText("before");
      Object.defineProperty(navigator, "clipboard", { value: undefined, configurable: true }); // as without HTTPS
    });
    await last(page).locator(".code").getByRole("button").click();
    await last(page).getByRole("button", { name: "Copied" }).waitFor(WAIT);
    await page.evaluate(() => delete navigator.clipboard);
    assert.match(await copied(), /^import json/);
  },
  async an_answer_tells_what_was_cached_and_why_it_took_so_long() {
    const answer = await answered(page, say("It reads JSON", "And json.loads?"));
    const told = await answer.locator(".figures summary").textContent();
    const [, cached, asked] = told.match(/first token after .*· ([\d,]+) of ([\d,]+) prompt tokens cached/);
    assert(Number(cached) > 0 && Number(cached) <= Number(asked), told);
    await answer.locator(".figures summary").click();
    assert.match(await answer.locator(".figures").textContent(), /% of the time went into .*taken up from memory.*were written at/);
  },
  async a_streaming_answer_keeps_selection_fold_and_place() {
    let go;
    const gate = new Promise((open) => { go = open; });
    const words = (from, to) => Array.from({ length: to - from }, (_, i) => ({ content: `word${from + i}${(from + i) % 12 ? " " : "\n\n"}` }));
    const code = [{ content: "\n\n```python\n" }, ...Array.from({ length: 30 }, (_, i) => ({ content: `x${i} = "${i}"\n` })), { content: "```\n\n" }];
    own.set(CHAT, paced([{ reasoning_content: "Let me *see*." }, ...words(0, 400), () => gate, ...words(400, 700), ...code, ...words(700, 800)], 2));
    await begin(page);
    await ask(page, "Say much");
    await page.locator("#messages .said", { hasText: "word399" }).waitFor(WAIT);
    await page.locator(".thinking summary").click();
    await page.evaluate(() => {
      const paragraphs = document.querySelectorAll("#messages .said p");
      const [first, growing] = [paragraphs[1].firstChild, paragraphs[paragraphs.length - 1].firstChild];
      getSelection().setBaseAndExtent(first, 3, growing, 10);
      document.querySelector("#messages").scrollTop = 300;
    });
    const state = () => page.evaluate(() => ({
      selected: String(getSelection()), open: document.querySelector(".thinking").open, top: document.querySelector("#messages").scrollTop,
    }));
    await page.locator("#to-end").waitFor(WAIT);
    const before = await state();
    assert(before.selected.length > 1000 && before.open);
    go();
    await done(page);
    await page.locator("#messages .said", { hasText: "word799" }).waitFor(WAIT);
    own.delete(CHAT);
    assert.deepEqual(await state(), before);
    await page.locator("#to-end").click();
    assert(await page.evaluate(() => { const { scrollHeight, scrollTop, clientHeight } = document.querySelector("#messages"); return scrollHeight - scrollTop - clientHeight < 40; }));
  },
  async stops_and_goes_on() {
    await begin(page);
    await ask(page, say(LONG, "Say much."));
    await page.locator(".running .said", { hasText: "word3" }).waitFor(WAIT);
    await page.keyboard.press("Escape");
    await done(page);
    assert.match(await last(page).locator(".foot").textContent(), /stopped/);
    const begun = (await last(page).locator(".said").textContent()).trim();
    assert.doesNotMatch(begun, /word119/);
    const body = await nextBody(() => last(page).getByRole("button", { name: "Continue" }).click());
    await done(page);
    assert.equal(body.continue_final_message, true);
    assert.equal(body.messages.at(-1).role, "assistant");
    const whole = (await last(page).locator(".said").textContent()).trim();
    assert(whole.startsWith(begun) && whole.length > begun.length);
  },
  async edits_and_other_answers_are_branches() {
    await begin(page);
    await answered(page, say("first", "One."));
    await answered(page, say("second", "Two."));
    const question = page.locator("#messages > li.user").last();
    await question.getByRole("button", { name: "Edit" }).click();
    let num_asked = 0;
    page.on("request", (request) => { num_asked += request.url().endsWith(CHAT); });
    await page.getByLabel("Edit the question").fill("  ");
    await page.keyboard.press("Control+Enter");
    assert(await page.locator(".editor .main").isDisabled());
    assert.equal(num_asked, 0);
    await page.getByLabel("Edit the question").fill(say("edited", "Two, again."));
    await page.keyboard.press("Control+Enter");
    await page.locator(".said", { hasText: "edited" }).waitFor(WAIT);
    await done(page);
    assert.equal(await page.locator("#messages > li").count(), 4);
    await last(page).getByRole("button", { name: "Regenerate" }).click();
    await page.locator("#messages > li").last().locator(".branches", { hasText: "2 / 2" }).waitFor(WAIT);
    await page.locator("#messages > li.user").last().getByRole("button", { name: "Previous version" }).click();
    assert.match(await last(page).locator(".said").textContent(), /second/);
    await page.locator("#messages > li.user").last().getByRole("button", { name: "Next version" }).click();
    assert.match(await last(page).locator(".said").textContent(), /edited/);
    await page.locator("#question").press("ArrowUp"); // edits the last question
    await page.getByLabel("Edit the question").waitFor(WAIT);
    await page.keyboard.press("Escape");
  },
  async conversations_are_found_renamed_deleted_and_brought_back() {
    await menu("Rename");
    await page.getByLabel("Name of the conversation").fill("Branches of a tree");
    await page.keyboard.press("Enter");
    await page.locator("#title", { hasText: "Branches of a tree" }).waitFor(WAIT);
    await page.reload();
    await page.keyboard.press("/");
    await page.locator("#search").fill("edited branches");
    assert.deepEqual(await titles(), ["Branches of a tree"]);
    await page.locator("#search").fill("");
    await page.locator("#conversations .open", { hasText: "Branches of a tree" }).click();
    await menu("Delete");
    await page.locator("#conversations .open", { hasText: "Branches of a tree" }).waitFor({ state: "detached", ...WAIT });
    await page.locator(".toast").getByRole("button", { name: "Undo" }).click();
    await page.locator("#title", { hasText: "Branches of a tree" }).waitFor(WAIT);
    await page.reload();
    await page.locator("#conversations .open", { hasText: "Branches of a tree" }).click();
    await page.locator(".branches", { hasText: "2 / 2" }).first().waitFor(WAIT);
  },
  async conversations_are_exported_and_imported_once() {
    const exported = async (item) => {
      const saved = page.waitForEvent("download");
      await menu(item);
      return readFile(await (await saved).path());
    };
    const imports = async (name, buffer, words) => {
      await page.keyboard.press("Alt+s");
      const chosen = page.waitForEvent("filechooser");
      await page.getByRole("button", { name: "Import" }).click();
      await (await chosen).setFiles({ name, mimeType: "text/plain", buffer });
      await page.locator(".toast", { hasText: words }).last().waitFor(WAIT);
      await page.keyboard.press("Escape");
    };
    const [json, markdown] = [await exported("Export as JSON"), await exported("Export as Markdown")];
    await imports("tree.json", json, "is here already");
    await menu("Delete");
    for (const [name, buffer] of [["tree.json", json], ["tree.md", markdown]]) {
      await imports(name, buffer, "was imported");
      assert.match(await last(page).locator(".said").textContent(), /edited/);
      assert.equal(await page.locator("#messages > li").count(), 4);
      await imports(name, buffer, "is here already");
    }
    assert.equal((await titles()).filter((title) => title === "Branches of a tree").length, 2);
    await imports("no.json", Buffer.from("{}"), "no.json has no conversations");
  },
  async what_is_typed_stays_with_its_conversation() {
    await page.locator("#question").fill("not sent yet");
    await begin(page);
    assert.equal(await page.locator("#question").inputValue(), "");
    await page.locator("#question").fill("another thought");
    await page.locator("#conversations .open", { hasText: "Branches of a tree" }).first().click();
    assert.equal(await page.locator("#question").inputValue(), "not sent yet");
    await page.locator("#question").fill("");
  },
  async a_reload_and_the_browsers_back_lead_to_the_conversation() {
    await begin(page);
    await answered(page, say("here", "Reloaded"));
    await page.reload();
    await page.locator("#title", { hasText: "Reloaded" }).waitFor(WAIT);
    await page.locator("#conversations .open", { hasText: "Branches of a tree" }).first().click();
    await page.goBack();
    await page.locator("#title", { hasText: "Reloaded" }).waitFor(WAIT);
    await page.keyboard.press("Alt+l");
    await page.locator("#live").waitFor(WAIT);
    await page.keyboard.press("Escape");
    await page.locator("#chat").waitFor(WAIT);
  },
  async a_system_prompt_belongs_to_its_conversation_and_presets_fill_it() {
    await begin(page);
    await settings(async (panel) => {
      await panel.locator("#preset").selectOption("Concise");
      assert.match(await panel.locator("#system").inputValue(), /few words/);
      await panel.locator("#system").fill("Speak like a pirate.");
      await panel.locator("#preset-name").fill("Pirate");
      await panel.getByRole("button", { name: "Save as preset" }).click();
      await audit(page, "settings");
    });
    const body = await nextBody(() => answered(page, say("Arr", "Hello")));
    assert.deepEqual(body.messages[0], { role: "system", content: "Speak like a pirate." });
    await begin(page);
    const other = await nextBody(() => answered(page, say("Good day", "Hello")));
    assert.equal(other.messages[0].role, "user");
    await page.reload();
    await settings((panel) => panel.locator("#preset").selectOption("Pirate"));
  },
  async sampling_has_its_defaults_and_is_checked() {
    await begin(page);
    const plain = await nextBody(() => answered(page, say("a", "Defaults")));
    assert.equal(plain.temperature, 0.7);
    assert(!("top_p" in plain) && !("seed" in plain) && !("max_tokens" in plain));
    await settings(async (panel) => {
      assert.equal(await panel.getByLabel("Top p").getAttribute("placeholder"), "1");
      for (const [label, value] of [["Temperature", "0.2"], ["Top p", "0.9"], ["Top k", "40"], ["Min p", "0.05"], ["Repetition penalty", "1.1"],
        ["Frequency penalty", "0.1"], ["Presence penalty", "0.2"], ["Seed", "7"], ["Most tokens", "50"]]) await panel.getByLabel(label).fill(value);
      await panel.getByLabel("Stop at").fill("END");
      await panel.getByLabel("Top p").fill("7");
      assert.equal(await panel.getByLabel("Top p").getAttribute("aria-invalid"), "true");
    });
    const { messages, model, stream, stream_options, prompt_cache_key, enable_thinking, ...set } = await nextBody(() => answered(page, say("a", "Set")));
    assert.deepEqual(set, { temperature: 0.2, top_p: 0.9, top_k: 40, min_p: 0.05, repetition_penalty: 1.1, frequency_penalty: 0.1, presence_penalty: 0.2, seed: 7, max_tokens: 50, stop: ["END"] });
    await settings((panel) => panel.getByRole("button", { name: "Reset to the defaults" }).click());
    assert.equal((await nextBody(() => answered(page, say("a", "Reset")))).temperature, 0.7);
  },
  async files_are_dropped_folded_and_fenced() {
    await begin(page);
    const nested = "# Notes\n```js\nlet a = `x`;\n```\n";
    const dropped = await page.evaluateHandle((text) => {
      const data = new DataTransfer();
      data.items.add(new File([text], "notes.md", { type: "text/markdown" }));
      data.items.add(new File([new Uint8Array([0xff, 0xfe, 0x00])], "photo.bin"));
      return data;
    }, nested);
    await page.dispatchEvent("#main", "dragenter", { dataTransfer: dropped });
    assert(await page.locator("#main.dropping").count());
    await page.dispatchEvent("#main", "drop", { dataTransfer: dropped });
    await page.locator(".toast", { hasText: "photo.bin was not attached: it is not UTF-8 text." }).waitFor(WAIT);
    assert.equal(await page.locator("#attached li").count(), 1);
    const body = await nextBody(() => answered(page, say("Read", "What is this?")));
    assert(body.messages[0].content.startsWith(`notes.md:\n\`\`\`\`\n${nested}\`\`\`\`\n\nWhat`));
    const fold = page.locator(".bubble details.file");
    assert.equal(await fold.evaluate((node) => node.open), false);
    await fold.locator("summary").click();
    assert.match(await fold.locator("pre").textContent(), /let a/);
  },
  async thinking_is_offered_only_where_the_model_can() {
    await page.getByRole("button", { name: "Think", exact: true }).click();
    assert.equal((await nextBody(() => answered(page, say("b", "No thought")))).enable_thinking, false);
    await page.getByRole("button", { name: "Think", exact: true }).click();
    const told = await (await fetch(`${server}/status`)).json();
    own.set("/status", (_, response) => response.end(JSON.stringify({ ...told, thinks: false })));
    const plain = await open(url);
    assert.equal(await plain.locator("#think").isVisible(), false);
    const asked = plain.waitForRequest(`**${CHAT}`);
    await answered(plain, say("c", "Plain"));
    assert(!("enable_thinking" in (await asked).postDataJSON()));
    await plain.context().close();
    own.delete("/status");
  },
  async light_dark_and_the_systems_theme() {
    const paper = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
    const light = await paper();
    await page.emulateMedia({ colorScheme: "dark" });
    const dark = await paper();
    assert.notEqual(dark, light);
    await audit(page, "dark");
    await settings((panel) => panel.locator("label", { hasText: "light" }).click());
    assert.equal(await paper(), light);
    await page.reload();
    assert.equal(await paper(), light);
    await settings((panel) => panel.locator("label", { hasText: "system" }).click());
    assert.equal(await paper(), dark);
    await page.emulateMedia({ colorScheme: "light" });
  },
  async a_keyboard_is_enough() {
    await begin(page);
    await answered(page, say("keys", "Keys"));
    await page.locator("#messages").focus();
    const seen = [];
    for (let i = 0; i < 12; i += 1) {
      await page.keyboard.press("Tab");
      seen.push(await page.evaluate(() => document.activeElement.ariaLabel ?? document.activeElement.tagName));
      assert.equal(await page.evaluate(() => getComputedStyle(document.activeElement).opacity), "1", seen.at(-1));
    }
    for (const name of ["Copy", "Edit", "Regenerate"]) assert(seen.includes(name), `${name} in ${seen}`);
    await page.locator("#more").focus();
    await page.keyboard.press("Enter");
    await page.keyboard.press("ArrowDown");
    assert.match(await page.evaluate(() => document.activeElement.textContent), /System prompt/);
    await audit(page, "menu");
    await page.keyboard.press("Escape");
    assert.equal(await page.evaluate(() => document.activeElement.id), "more");
    await page.keyboard.press("Alt+n");
    assert.equal(await page.evaluate(() => document.activeElement.id), "question");
    await page.locator("#watch").focus();
    await page.keyboard.type("typed");
    assert.equal(await page.locator("#question").inputValue(), "typed");
    await page.locator("#question").fill("");
  },
  async tabs_keep_each_others_conversations() {
    const other = await page.context().newPage();
    await other.goto(url);
    await answered(other, say("from the other tab", "Other tab"));
    await page.locator("#conversations .open", { hasText: "Other tab" }).waitFor(WAIT);
    await begin(page);
    await answered(page, say("from this tab", "This tab"));
    await other.locator("#conversations .open", { hasText: "This tab" }).waitFor(WAIT);
    await other.locator("#more").click();
    await other.getByRole("menuitem", { name: "Delete" }).click();
    await page.locator("#conversations .open", { hasText: "Other tab" }).waitFor({ state: "detached", ...WAIT });
    await other.close();
    await page.reload();
    await page.locator("#conversations .open", { hasText: "This tab" }).waitFor(WAIT);
    assert(!(await titles()).some((title) => title.startsWith("Other tab")));
  },
  async tabs_that_answer_in_one_conversation_lose_nothing() {
    let go;
    const gate = new Promise((open) => { go = open; });
    own.set(CHAT, paced([{ content: "from this " }, () => gate, { content: "tab" }]));
    await begin(page);
    await ask(page, "Both tabs");
    await page.locator("#messages .said", { hasText: "from this" }).waitFor(WAIT);
    own.delete(CHAT);
    const other = await page.context().newPage();
    await other.goto(url);
    await other.locator("#conversations .open", { hasText: "Both tabs" }).click();
    assert.match(await last(other).locator(".foot").textContent(), /still being written/);
    await answered(other, say("from the other tab", "Beside it"));
    go();
    await done(page);
    for (const tab of [page, other]) {
      const kept = await poll(() => stored(tab, "Both tabs"), (said) => said.includes("from this tab"));
      assert.deepEqual(kept.filter((said) => !said.startsWith("Beside")).sort(), ["Both tabs", "from the other tab", "from this tab"]);
    }
    await other.close();
  },
  async what_another_tab_deletes_while_it_is_answered_stays_deleted() {
    let go;
    const gate = new Promise((open) => { go = open; });
    own.set(CHAT, paced([{ content: "begun " }, () => gate, { content: "ended" }]));
    await begin(page);
    await ask(page, "Deleted elsewhere");
    await page.locator("#messages .said", { hasText: "begun" }).waitFor(WAIT);
    const other = await page.context().newPage();
    await other.goto(url);
    await other.locator("#conversations .open", { hasText: "Deleted elsewhere" }).click();
    await other.locator("#more").click();
    await other.getByRole("menuitem", { name: "Delete" }).click();
    await page.locator("#conversations .open", { hasText: "Deleted elsewhere" }).waitFor({ state: "detached", ...WAIT });
    go();
    await done(page);
    own.delete(CHAT);
    await other.close();
    await page.reload();
    await page.locator("#conversations .open").first().waitFor(WAIT);
    assert(!(await titles()).some((title) => title.startsWith("Deleted elsewhere")));
  },
  async another_conversation_is_used_while_one_is_answered() {
    await begin(page);
    await ask(page, say(LONG, "Long beside another."));
    await page.locator(".running .said", { hasText: "word3" }).waitFor(WAIT);
    await page.locator("#conversations .open", { hasText: "This tab" }).click();
    await answered(page, say("beside it", "Beside"));
    await page.locator("#conversations .open", { hasText: "Long beside" }).click();
    await page.locator(".said", { hasText: "word119" }).waitFor(WAIT);
    await done(page);
  },
  async what_is_deleted_while_it_is_answered_stays_deleted() {
    await begin(page);
    await ask(page, say(LONG, "Deleted soon."));
    await page.locator(".running .said", { hasText: "word3" }).waitFor(WAIT);
    await menu("Delete");
    await page.reload();
    await page.locator("#conversations .open").first().waitFor(WAIT);
    assert(!(await titles()).some((title) => title.startsWith("Deleted soon")));
  },
  async an_answer_that_failed_is_not_sent_back() {
    await begin(page);
    await page.route(`**${CHAT}`, (route) => route.abort(), { times: 1 });
    await ask(page, say("never", "Fails."));
    await page.locator("#messages .wrong").waitFor(WAIT);
    faults.splice(0); // the browser tells of it too
    const { messages } = await nextBody(() => ask(page, say("at last", "Again.")));
    assert.deepEqual(messages.map(({ role }) => role), ["user", "user"]);
    await done(page);
    assert.match(await last(page).textContent(), /at last/);
  },
  async what_an_earlier_page_kept_is_taken_up() {
    const earlier = await open(url);
    await earlier.evaluate(() => {
      const messages = [{ role: "user", content: "Kept long ago" }, { role: "assistant", content: "So it was" }];
      const all = ["one", "two"].map((id) => ({ id, title: `From earlier: ${id}`, messages }));
      localStorage.setItem("luceasync.conversations", JSON.stringify(all));
      localStorage.setItem("luceasync.conversation.three", JSON.stringify({ id: "three", title: "From earlier: three", messages, savedAt: 1 }));
    });
    for (const _ of [1, 2]) { // once is enough, twice changes nothing
      await earlier.reload();
      await earlier.locator("#conversations .open").first().waitFor(WAIT);
      assert.deepEqual(await earlier.locator("#conversations .open").allTextContents(), ["one", "two", "three"].map((id) => `From earlier: ${id}`));
    }
    await earlier.locator("#conversations .open").first().click();
    assert.match(await last(earlier).textContent(), /So it was/);
    await earlier.context().close();
  },
  async works_where_nothing_may_be_kept() {
    const context = await browser.newContext({ locale: "en-US" });
    await context.addInitScript(() => {
      for (const name of ["localStorage", "sessionStorage", "indexedDB"]) {
        Object.defineProperty(window, name, { get() { throw new DOMException("no", "SecurityError"); } });
      }
    });
    const bare = await context.newPage();
    watch(bare, url);
    await bare.goto(url);
    await answered(bare, say("kept nowhere", "Hello"));
    assert.match(await last(bare).textContent(), /kept nowhere/);
    await bare.locator(".toast", { hasText: "store anything" }).waitFor(WAIT);
    await context.close();
  },
  async works_on_a_phone_in_the_dark() {
    const phone = await open(url, { viewport: { width: 390, height: 760 }, colorScheme: "dark", hasTouch: true, isMobile: true });
    assert(await phone.locator(".starter").first().evaluate((node) => node.getBoundingClientRect().bottom < innerHeight));
    await audit(phone, "phone, empty");
    await answered(phone, say(MARKDOWN, "Hello"));
    assert(await phone.evaluate(() => document.documentElement.scrollWidth <= innerWidth));
    assert(await last(phone).getByRole("button", { name: "Regenerate" }).evaluate((node) => getComputedStyle(node).opacity === "1"));
    await audit(phone, "phone, chat");
    await phone.locator("#menu").click();
    await audit(phone, "phone, list");
    await phone.locator("#new").click();
    await phone.locator(".starter").first().waitFor(WAIT);
    await phone.context().close();
  },
  async a_key_is_asked_for() {
    own.set(CHAT, (request, response) => {
      request.resume();
      response.writeHead(request.headers.authorization === "Bearer secret" ? 400 : 401, { "content-type": "application/json" });
      response.end(JSON.stringify({ error: { message: "No key." } }));
    });
    await begin(page);
    await ask(page, "Who is there?");
    await page.locator("#settings #key").fill("secret");
    await page.keyboard.press("Escape");
    const [request] = await Promise.all([page.waitForRequest(`**${CHAT}`), ask(page, "It is me.")]);
    assert.equal(request.headers().authorization, "Bearer secret");
    await page.locator("#messages .wrong").nth(1).waitFor(WAIT);
    own.delete(CHAT);
    faults.splice(0); // the browser tells of both
  },
  async a_server_with_keys_says_so_at_once() {
    own.set("/status", (request, response) => {
      response.writeHead(request.headers.authorization === "Bearer secret" ? 302 : 401, { "content-type": "application/json", location: `/status?again` });
      response.end(JSON.stringify({ error: { message: "No key." } }));
    });
    const context = await browser.newContext({ locale: "en-US" });
    const locked = await context.newPage();
    await locked.goto(url);
    await locked.getByRole("button", { name: "Enter the key" }).click();
    await locked.locator("#settings #key").fill("secret");
    await locked.keyboard.press("Escape");
    await locked.locator(".starter").first().waitFor(WAIT);
    await context.close();
    own.delete("/status");
    faults.splice(0); // of the other page, which asked meanwhile
  },
  async a_closed_page_keeps_what_has_come_of_an_answer() {
    let go;
    const gate = new Promise((open) => { go = open; });
    const words = Array.from({ length: 300 }, (_, i) => ({ content: `piece${i} ` }));
    own.set(CHAT, paced([...words, () => gate, { content: " and the end" }], 25));
    await begin(page);
    await ask(page, "Closed meanwhile");
    const isKept = () => page.evaluate(() => new Promise((resolve) => {
      indexedDB.open("luceasync").onsuccess = ({ target }) => {
        target.result.transaction("conversations").objectStore("conversations").getAll().onsuccess = (found) => {
          resolve(found.target.result.some(({ messages }) => Object.values(messages).some(({ content }) => content.startsWith("piece0 piece1"))));
        };
      };
    }));
    for (let i = 0; i < 60 && !(await isKept()); i += 1) await page.waitForTimeout(500);
    await page.reload();
    await page.locator("#conversations .open", { hasText: "Closed meanwhile" }).click();
    await page.locator(".said", { hasText: "piece0 piece1" }).waitFor(WAIT);
    await last(page).getByRole("button", { name: "Continue" }).waitFor(WAIT);
    assert.match(await last(page).locator(".foot").textContent(), /stopped/);
    go();
    own.delete(CHAT);
    faults.splice(0); // of the broken stream
  },
  async nobody_else_is_asked_and_nothing_is_refused() {
    assert.deepEqual(foreign, []);
    assert.deepEqual(faults, []);
  },
});
