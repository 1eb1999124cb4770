// Branches, files, series, prefixes and words; ends with an error if a rule is broken.

import assert from "node:assert";
import { append, canContinue, create, fenced, isSame, matches, path, requestMessages, select, upgraded } from "./conversation.js";
import { Series } from "./series.js";
import { fromFile, toJson, toMarkdown } from "./transfer.js";
import { chains } from "./tree.js";
import { explained, labelOf } from "./words.js";

const said = (conversation) => path(conversation).map(({ content }) => content).join("|");

function branched() {
  const made = create("Be brief.");
  made.title = "Title";
  const one = append(made, null, { role: "user", content: "one", files: [{ name: "a.md", text: "```\nx\n```" }] });
  append(made, one.id, { role: "assistant", content: "first" });
  const second = append(made, one.id, { role: "assistant", content: "second", reasoning_content: "hm" });
  append(made, second.id, { role: "user", content: "## You\n\\## Model" });
  return { made, one, second };
}

const cases = {
  a_branch_is_shown_to_its_newest_end() {
    const { made, one } = branched();
    const [first, second] = Object.values(made.messages).filter(({ parent }) => parent === one.id);
    select(made, first.id);
    assert.equal(said(made), "one|first");
    select(made, second.id);
    assert.equal(said(made), "one|second|## You\n\\## Model");
  },
  a_fence_is_longer_than_any_within_it() {
    assert.equal(fenced({ name: "n", text: "a ````` b" }), "n:\n``````\na ````` b\n``````");
  },
  a_request_has_the_branch_and_no_answer_that_failed() {
    const { made } = branched();
    append(made, made.head, { role: "assistant", content: "", error: "no" });
    const [system, question, answer, last, ...rest] = requestMessages(made);
    assert.deepEqual([system.role, question.role, answer.reasoning_content, last.role, rest.length], ["system", "user", "hm", "user", 0]);
    assert(question.content.startsWith("a.md:\n````\n```\nx\n```\n````\n\none"));
  },
  only_broken_answers_with_text_are_continued() {
    const answer = { role: "assistant", content: "x" };
    assert(canContinue({ ...answer, cut: true }) && canContinue({ ...answer, error: "lost" }));
    assert(!canContinue(answer) && !canContinue({ ...answer, content: "", stopped: true }));
    assert(canContinue({ ...answer, stopped: true, writtenAt: Date.now() - 60_000 }));
    assert(!canContinue({ ...answer, stopped: true, writtenAt: Date.now() - 6000 })); // another tab writes it
  },
  what_is_exported_comes_back() {
    const { made } = branched();
    const [whole] = fromFile("a.json", toJson([made]));
    assert.deepEqual([whole.messages, whole.head, whole.system], [made.messages, made.head, "Be brief."]);
    const [shown] = fromFile("a.md", toMarkdown(made));
    assert.deepEqual([shown.title, shown.system, path(shown).length], ["Title", "Be brief.", 3]);
    assert.equal(path(shown)[2].content, "## You\n\\## Model");
    const [again] = fromFile("a.md", toMarkdown(made));
    assert(isSame(whole, made) && isSame(shown, again) && !isSame(shown, made));
  },
  figures_that_are_no_numbers_are_not_shown() {
    const told = { firstMs: 3, usage: { prompt_tokens: 5, completion_tokens: 2 }, timings: { queued_ms: 0, prompt_ms: 1, predicted_ms: 2, prompt_n: 5, predicted_n: 2 }, luceasync: { restore_ms: 0 } };
    const kept = (changed) => {
      const { made } = branched();
      made.messages[made.head].told = { ...told, ...changed };
      return Boolean(upgraded(made).messages[made.head].told);
    };
    assert(kept({}) && kept({ luceasync: { restore_ms: 0, speculation: { rounds: 1, accepted: 2, proposed: 3, tau: 1.5 } } }));
    for (const wrong of [{ firstMs: "x" }, { usage: { prompt_tokens: "many", completion_tokens: 2 } }, { timings: {} }, { luceasync: { restore_ms: 0, speculation: { rounds: 1 } } }]) assert(!kept(wrong));
  },
  what_is_no_conversation_is_refused() {
    const { made } = branched();
    const [first] = Object.values(made.messages);
    const circle = { ...made, messages: { ...made.messages, [first.id]: { ...first, parent: made.head } } };
    for (const wrong of [null, {}, { id: "x", messages: [] }, { ...made, head: "nowhere" }, circle]) assert.equal(upgraded(wrong), null);
    assert.throws(() => fromFile("x.json", "{"), /x\.json has no conversations/);
    assert.equal(said(upgraded({ id: "x", messages: [{ role: "user", content: "a" }, { role: "assistant", content: "b" }] })), "a|b");
  },
  all_words_are_searched_in_all_branches() {
    const { made } = branched();
    assert(matches(made, "FIRST title") && !matches(made, "first third"));
  },
  rates_follow_totals_and_a_restart_draws_nothing() {
    const series = new Series();
    const status = (prefill, decode, restored) => ({ prefilled_tokens_total: prefill, decoded_tokens_total: decode, num_running: 1, num_queued: 0, cache: { restored_tokens_total: { memory: restored } }, speculation: null });
    series.add(status(0, 0, 0), 0);
    series.add(status(100, 20, 300), 2000);
    series.add(status(0, 5, 0), 3000);
    const [, second, third] = series.points;
    assert.deepEqual([second.prefill, second.decode, second.cached, second.accepted], [50, 10, 0.75, null]);
    assert.equal(third.decode, null);
  },
  chains_end_at_branches_and_know_whose_they_are() {
    const node = (key, parent, begin, idle_s, conversation = null) => ({ key, parent, begin, end: begin + 64, num_bytes: {}, hits: 0, idle_s, conversation });
    const rows = chains([node("a", "unlisted", 0, 9), node("b", "a", 64, 9), node("c", "b", 128, 5, "mine"), node("d", "b", 128, 1, "theirs"), node("e", null, 0, 0)]);
    assert.deepEqual(rows.map(({ key, above, labels }) => [key, above, labels.sort()]), [["e", null, []], ["a", null, ["mine", "theirs"]], ["d", 1, ["theirs"]], ["c", 1, ["mine"]]]);
  },
  an_answer_says_what_it_waited_for() {
    const timings = { queued_ms: 500, prompt_n: 10, prompt_ms: 100, prompt_per_second: 100, predicted_n: 4, predicted_ms: 400, predicted_per_second: 10 };
    const luceasync = { tier: "disk", restore_ms: 20, decision: "trial", miss_reason: "no_memory" };
    const words = explained({ prompt: 100, cached: 90, written: 5, timings, luceasync }).join(" ");
    assert.match(words, /^49 % of the time went into waiting for a lane\. It waited 500 ms until it got a lane\. 90 of 100 tokens .* from the disk in 20 ms: .*trial\. No more was taken up: there was no memory/);
  },
  labels_are_those_of_the_server() {
    assert.equal(labelOf("Ünamed"), process.argv[2]);
  },
};

for (const [name, run] of Object.entries(cases)) {
  try {
    run();
  } catch (error) {
    console.error(`${name}: ${error.stack}`);
    process.exitCode = 1;
  }
}
