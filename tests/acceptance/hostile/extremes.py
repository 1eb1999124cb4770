"""Chat requests with fields at their extremes, two at a time, made from the schema.

Owns which values are extreme for which type, and what an answer must be.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import msgspec

from luceasync.errors import RequestError
from luceasync.request import ModelCard
from luceasync.server.http.auth import Caller
from luceasync.server.openai.chat_body import ChatBody, parse_chat
from luceasync.server.unserved import UNSERVED_FIELDS

# Literals, as JSON may or may not spell them.
WRONG = ["null", "true", '"1"', "[]", "{}", "[null]", '""', "NaN", "Infinity", "-Infinity"]
WHOLE = ["0", "-0", "1", "-1", "2", "2147483647", "2147483648", "9223372036854775807",
         "-9223372036854775808", "9223372036854775808", "1" + "0" * 400, "1.0", "1.5"]  # fmt: skip
REAL = ["0", "-0.0", "1", "-1", "0.5", "1e-9", "1e-40", "5e-324", "1e-400", "0.9999999999999999",
        "1.0000000000000002", "2", "-2", "100", "-100", "1e38", "1e308", "1e999", "-1e999",
        "1" + "0" * 400]  # fmt: skip
TEXT = ['"x"', '"auto"', '"none"', '"text"', '"\\u0000"', '"\\ud800"', json.dumps("x" * 300),
        json.dumps("\U0001f600" * 256), json.dumps("x" * 100_000)]  # fmt: skip
STOPS = [*TEXT, '["a"]', '["a","b","c","d"]', '["a","a","a","a","a"]', '[" ", ""]', '["\\n"]',
         json.dumps(["x" * 256] * 4), '["<|im_end|>"]', "[1]"]  # fmt: skip
LISTS = ["[{}]", '[{"type":"function"}]', "[1]", "[[]]", json.dumps([{}] * 2000),
         '[{"type":"function","function":{"name":"f"}}]',
         '[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}]',
         '[{"type":"function","function":{"name":"<|im_end|>","parameters":null}}]']  # fmt: skip
MAPS = ['{"type":"text"}', '{"type":"json_object"}', '{"include_usage":true}',
        '{"a":{"b":[]}}', '{"include_usage":1}',
        '{"continuous_usage_stats":true,"include_usage":true}',
        '{"enable_thinking":false}', '{"messages":[]}',
        "{" + '"a":{' * 500 + "}" * 501]  # fmt: skip
BIASES = ['{"0":100}', '{"0":-100}', '{"0":1e-40}', '{"0":101}', '{"-1":1}', '{"x":1}',
          '{"0":null}', '{"999999999":1}', '{"9999999999":1}', '{"00":1}',
          '{"1":-0.0,"2":5e-324}',
          json.dumps({str(i): -100 for i in range(1024)}),
          json.dumps({str(i): 100 for i in range(1024)}),
          json.dumps({str(i): 1 for i in range(1025)})]  # fmt: skip
SAID = '"messages":[{"role":"user","content":"What does os.getcwd do?"}]'
# Of a whole range's ends: what the schema's types do not tell.
ENDS = {
    "temperature": ["2.0000001", "1e-6"], "top_k": ["16", "1000000000"], "n": ["16", "17"],
    "top_p": ["1e-12"], "min_p": ["1e-12"], "repetition_penalty": ["0.01", "0.009", "100.1"],
    "frequency_penalty": ["-2.1"], "presence_penalty": ["2.1"], "top_logprobs": ["20", "21"],
}  # fmt: skip
MOST_TOKENS = 3
SHARE_TAKEN = 0.75  # of the pairs: both values are taken alone
CARD = ModelCard("fuzzed", 0, 4096, 1_000_000, "qwen3")
FINISHED = {"stop", "length", "tool_calls"}


def extremes() -> dict[str, list[str]]:
    """The literals of every field, except `messages` and `model`."""
    info = msgspec.inspect.type_info(ChatBody)
    assert isinstance(info, msgspec.inspect.StructType)
    unserved = set(UNSERVED_FIELDS)
    return {
        field.name: [*WRONG, *of_type(field.name, field.type), *ENDS.get(field.name, ())]
        for field in info.fields
        if field.name not in unserved | {"messages", "model"}
    } | {name: [*WRONG, '"x"', "1"] for name in sorted(unserved)}


def is_taken(name: str, value: str) -> bool:
    """Whether a request with this field alone is accepted."""
    try:
        parse_chat(f'{{{SAID},"logprobs":true,"{name}":{value}}}'.encode(), CARD, Caller())
    except RequestError:
        return False
    return True


def of_type(name: str, kind: msgspec.inspect.Type) -> list[str]:
    """Extreme values of a field's type."""
    if name == "logit_bias":
        return BIASES
    if name == "stop":
        return STOPS
    kinds = kind.types if isinstance(kind, msgspec.inspect.UnionType) else (kind,)
    found: list[str] = []
    for kind in kinds:
        match kind:
            case msgspec.inspect.IntType():
                found += WHOLE
            case msgspec.inspect.FloatType():
                found += REAL
            case msgspec.inspect.BoolType():
                found += ["false", "1", "0"]
            case msgspec.inspect.StrType():
                found += TEXT
            case msgspec.inspect.ListType():
                found += LISTS
            case msgspec.inspect.DictType() | msgspec.inspect.StructType():
                found += MAPS
    return found


def pairs(num: int, seed: int = 0) -> Iterator[bytes]:
    """Bodies: every value of every field at least once if `num` suffices, then random pairs."""
    values, draw = extremes(), random.Random(seed)
    taken = {name: [v for v in given if is_taken(name, v)] for name, given in values.items()}
    taken = {name: given for name, given in taken.items() if len(given) > 1}
    singles = [((name, value),) for name, given in values.items() for value in given]
    draw.shuffle(singles)
    any_two, taken_two = list(combinations(values, 2)), list(combinations(taken, 2))
    for number in range(num):
        if number < len(singles):
            fields = dict(singles[number])
            other = draw.choice([name for name in values if name not in fields])
            fields[other] = draw.choice(values[other])
        elif draw.random() < SHARE_TAKEN:
            fields = {name: draw.choice(taken[name]) for name in draw.choice(taken_two)}
        else:
            fields = {name: draw.choice(values[name]) for name in draw.choice(any_two)}
        if not fields.keys() & {"max_tokens", "max_completion_tokens"}:
            fields["max_tokens"] = str(MOST_TOKENS)
        said = ",".join(f'"{name}":{value}' for name, value in fields.items())
        yield f"{{{SAID},{said}}}".encode()


def asked_plainly() -> bytes:
    """A request whose answer must not depend on earlier requests."""
    return f'{{{SAID},"max_tokens":{MOST_TOKENS},"temperature":0}}'.encode()


def text_of(answer: bytes) -> str:
    """The text of a plain answer."""
    return str(json.loads(answer)["choices"][0]["message"]["content"])


def wrong_in(status: int, answer: bytes) -> str | None:
    """What is wrong with an answer; None for a refusal in words, or a whole answer."""
    if 400 <= status < 500:
        said = json.loads(answer)["error"]["message"]
        return None if said and len(answer) < 2000 else "a refusal that is not words"
    if status != 200:
        return f"status {status}"
    if answer.startswith((b"data:", b":")):
        events = [line for line in answer.split(b"\n\n") if line.startswith(b"data:")]
        if events[-1] != b"data: [DONE]":
            return "a stream that was broken off"
        return next(filter(None, map(_wrong_in_event, events[:-1])), None)
    said = json.loads(answer, parse_constant=_no_number)
    return next(filter(None, map(_wrong_in_choice, said["choices"])), None)


def _wrong_in_event(event: bytes) -> str | None:
    said = json.loads(event.removeprefix(b"data: "), parse_constant=_no_number)
    return "an error in a stream" if "error" in said else None


def _wrong_in_choice(choice: dict[str, Any]) -> str | None:
    if choice["finish_reason"] not in FINISHED:
        return f"it finished by {choice['finish_reason']!r}"
    for token in (choice.get("logprobs") or {}).get("content") or ():
        for entry in (token, *token["top_logprobs"]):
            if not isinstance(entry["logprob"], int | float) or entry["logprob"] > 1e-6:
                return f"a log-probability of {entry['logprob']!r}"
    return None


def _no_number(spelled: str) -> float:
    raise ValueError(f"{spelled} is not JSON")
