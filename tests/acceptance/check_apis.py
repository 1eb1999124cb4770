"""The same two turns through every API of a running server, by each vendor's own package.

    python -m tests.acceptance.check_apis http://127.0.0.1:8000

Greedy answers must have the same text in every API; how much of the second prompt was cached is
printed. Needs the packages `openai` and `anthropic`. Exit status 1 if an answer differs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import anthropic
import openai
from anthropic.types import MessageParam, TextBlock
from openai.types.chat import ChatCompletionMessageParam

QUESTION = "What does json.dumps do? " * 12
NEXT = "And json.loads?"
NUM_TOKENS = 20

Turns = tuple[str, str, int, int]  # two answers; cached and all tokens of the second prompt


def by_chat(url: str, model: str) -> Turns:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")

    def ask(messages: list[ChatCompletionMessageParam]) -> tuple[str, int, int]:
        got = client.chat.completions.create(
            model=model, messages=messages, max_tokens=NUM_TOKENS, temperature=0
        )
        assert got.usage is not None and got.usage.prompt_tokens_details is not None
        cached = got.usage.prompt_tokens_details.cached_tokens or 0
        return got.choices[0].message.content or "", cached, got.usage.prompt_tokens

    asked: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
    first, *_ = ask(asked)
    said: list[ChatCompletionMessageParam] = [{"role": "assistant", "content": first}]
    return first, *ask([*asked, *said, {"role": "user", "content": NEXT}])


def by_messages(url: str, model: str) -> Turns:
    client = anthropic.Anthropic(base_url=url, api_key="none")

    def ask(messages: list[MessageParam]) -> tuple[str, int, int]:
        with client.messages.stream(
            model=model, max_tokens=NUM_TOKENS, messages=messages, extra_body={"temperature": 0}
        ) as stream:
            got = stream.get_final_message()
        [block] = got.content
        assert isinstance(block, TextBlock)
        cached = got.usage.cache_read_input_tokens or 0
        return block.text, cached, cached + got.usage.input_tokens

    marked: list[MessageParam] = [
        {
            "role": "user",
            "content": [{"type": "text", "text": QUESTION, "cache_control": {"type": "ephemeral"}}],
        }
    ]
    first, *_ = ask(marked)
    asked: list[MessageParam] = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first},
        {"role": "user", "content": NEXT},
    ]
    return first, *ask(asked)


def by_responses(url: str, model: str) -> Turns:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    asked = [{"role": "user", "content": QUESTION}]
    options = {"model": model, "max_output_tokens": NUM_TOKENS, "temperature": 0}
    first = client.responses.create(input=asked, **options)  # type: ignore[call-overload]
    said = [item.model_dump() for item in first.output]
    again = [*asked, *said, {"role": "user", "content": NEXT}]
    second = client.responses.create(input=again, **options)  # type: ignore[call-overload]
    cached = second.usage.input_tokens_details.cached_tokens
    return first.output_text, second.output_text, cached, second.usage.input_tokens


APIS: dict[str, Callable[[str, str], Turns]] = {
    "chat": by_chat,
    "messages": by_messages,
    "responses": by_responses,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    url = parser.parse_args().url.rstrip("/")
    model = openai.OpenAI(base_url=f"{url}/v1", api_key="none").models.list().data[0].id
    found = {name: ask(url, model) for name, ask in APIS.items()}
    for name, (first, second, cached, num_prompt) in found.items():
        print(f"{name:10} {cached} of {num_prompt} tokens cached  {first[:40]!r} {second[:40]!r}")
    texts = {(first, second) for first, second, _, _ in found.values()}
    if len(texts) > 1:
        sys.exit("the answers differ")


if __name__ == "__main__":
    main()
