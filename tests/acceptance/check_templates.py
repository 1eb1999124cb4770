"""Chat templates of a folder, rendered here and by transformers, and what is found out about them.

    python -m tests.acceptance.check_templates DIR [--differences]

`DIR` has *.jinja files, one a model or family. Each is rendered, in the process that the server
uses, for conversations with and without a system message, tools, calls, results, reasoning, an
opened and a begun answer; transformers renders the same ones. Exit status 1 if a text differs.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers.utils.chat_template_utils import render_jinja_template

from luceasync.errors import LuceasyncError, ModelError, RequestError
from luceasync.text.answer.answer_format import AnswerFormat
from luceasync.text.answer.call_formats import FORMATS
from luceasync.text.isolation import IsolatedTemplate
from luceasync.text.past_calls import one_by_one
from luceasync.text.roles import TOOL as PROBE_TOOL
from luceasync.text.roles import Roles
from luceasync.text.shared_prefix import begun_answer
from luceasync.text.template import (
    StartTrial,
    Template,
    TemplateSource,
    TextParts,
    in_parts,
    wants_parts,
)
from luceasync.text.tokenizer import Tokenizer
from luceasync.text.told_tools import shows_tools, told_tools
from tests.acceptance import command

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
# What looks like a control token in the source of a template.
CONTROL = re.compile(
    r"<[|\uff5c][^|\uff5c<>\s'\"{}]+[|\uff5c]>|</?[a-z_]+>|<[A-Z_]+_\d+>|\[/?[A-Z_]+\]|<[|\uff5c]\w+>"
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name."}},
            "required": ["city"],
        },
    },
}
Message = Mapping[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def answer(text: str, **fields: Any) -> Message:
    return {"role": "assistant", "content": text, **fields}


def calling(*cities: str) -> list[Message]:
    """An answer that calls the tool for each city, and the results."""
    ids = [f"call0000{i}" for i in range(len(cities))]
    calls = [
        {
            "id": call_id,
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": city}},
        }
        for call_id, city in zip(ids, cities, strict=True)
    ]
    results = [
        {"role": "tool", "tool_call_id": call_id, "name": "weather", "content": f"12 C in {city}"}
        for call_id, city in zip(ids, cities, strict=True)
    ]
    return [answer("", tool_calls=calls), *results]


SYSTEM: Message = {"role": "system", "content": "Be brief."}
TURNS = [user("Hello."), answer("Hello to you."), user("How are you?")]
THOUGHT = answer("Four.", reasoning_content="Two and two.")


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that every template is tried with. `begun`: its last answer goes on."""

    name: str
    messages: Sequence[Message]
    tools: Sequence[Message] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    begun: bool = False


CHATS = (
    Chat("plain", [user("Hello.")]),
    Chat("system", [SYSTEM, user("Hello.")]),
    Chat("turns", [SYSTEM, *TURNS]),
    Chat("closed", [*TURNS[:2]], variables={"add_generation_prompt": False}),
    Chat("text", [user('<b> "quoted" & \u00e4\u6587\U0001f600\n\n  {{ x }}\\ ')]),
    Chat("reasoning", [user("2 + 2?"), THOUGHT, user("And 3 + 3?")]),
    Chat("thinking off", [user("Hello.")], variables={"enable_thinking": False}),
    Chat("begun", [*TURNS, answer("I am")], begun=True),
    Chat("tools", [SYSTEM, user("The weather?")], [TOOL]),
    Chat("call", [user("The weather?"), *calling("Oslo")], [TOOL]),
    Chat(
        "turn after call", [user("?"), *calling("Oslo"), answer("12 C."), user("Thanks.")], [TOOL]
    ),
    Chat("two calls", [user("The weather?"), *calling("Oslo", "Rome")], [TOOL]),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What is known of a template, chats by kind. `refused`: by both. `fitted`: a conversation is
    fitted to the template here, which otherwise refuses it or drops a second call. `told`: the
    template drops tools, calls or results, which become text here. `differing`: both texts.
    `between`: what forced calls are separated by, learned from the template; None: not learned.
    """

    name: str
    equal: int = 0
    refused: int = 0
    fitted: int = 0
    told: int = 0
    differing: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    calls: str = "none"
    max_calls: int | None = None
    between: str | None = None
    reasoning: str = "none"
    error: str = ""


class Subject:
    """One template, as the server prepares it."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError."""
        self.text = path.read_text(encoding="utf-8")
        self.source = TemplateSource(path, self.text, special_tokens=SPECIAL_TOKENS)
        self.own = IsolatedTemplate(self.source)
        trial: Template = StartTrial(self.own, path)
        self.wants_parts = wants_parts(trial)
        if self.wants_parts:
            trial = TextParts(trial)
        self.tokenizer = tokenizer_of(self.text)
        self.tells = not shows_tools(trial)
        shows_calls = AnswerFormat.of(trial, self.tokenizer).calls is not None
        self.served = told_tools(trial, shows_calls=shows_calls) if self.tells else trial
        self.answers = AnswerFormat.of(self.served, self.tokenizer)
        self.roles = {False: Roles.of(self.served), True: Roles.of(self.served, [PROBE_TOOL])}

    def roles_of(self, chat: Chat) -> Roles:
        return self.roles[bool(chat.tools)]

    def rewrites(self, chat: Chat) -> bool:
        """Whether the template drops tools, calls or results of the chat, which become text."""
        roles = self.roles_of(chat)
        has_calls = any("tool_calls" in message for message in chat.messages)
        return bool(chat.tools) and (
            self.tells or (has_calls and not (roles.calls and roles.results))
        )

    def rendered(self, chat: Chat) -> str:
        """The prompt as the server renders it. Raises RequestError."""
        refusals = []
        for fit in self.roles_of(chat).fits:
            try:
                messages = fit(chat.messages)
                if chat.begun:
                    return begun_answer(self.served, messages, chat.tools, **chat.variables)
                return self.served.render(messages, chat.tools, **chat.variables)
            except RequestError as refusal:
                refusals.append(refusal)
        raise refusals[0]


def tokenizer_of(source: str) -> Tokenizer:
    """A tokenizer of bytes with the control tokens that the template writes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(sorted({*CONTROL.findall(source), *SPECIAL_TOKENS.values()}))
    return Tokenizer(backend.to_str())


def expected(source: str, chat: Chat, *, wants_parts: bool = False) -> Iterator[str]:
    """What transformers renders, with arguments as objects and as JSON; nothing if it refuses.
    `wants_parts`: texts are lists of parts.
    """
    variables = {"add_generation_prompt": not chat.begun, **SPECIAL_TOKENS, **chat.variables}
    for as_text in (False, True):
        said = [in_parts(message) if wants_parts else message for message in chat.messages]
        messages = json.loads(json.dumps(said))
        for message in messages:
            for call in message.get("tool_calls", ()) if as_text else ():
                call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
        try:
            [text], _ = render_jinja_template(
                conversations=[messages],
                tools=None if chat.tools is None else list(chat.tools),
                chat_template=source,
                continue_final_message=chat.begun,
                **variables,
            )
        except Exception:  # whatever a template raises
            continue
        yield text


def with_one_call_each(subject: Subject, chat: Chat) -> Iterator[str]:
    """What transformers renders if each call is a message of its own."""
    parted = replace(chat, messages=list(one_by_one(chat.messages)))
    return expected(subject.text, parted, wants_parts=subject.wants_parts)


def find(path: Path) -> Finding:
    """Try one template with every chat."""
    try:
        subject = Subject(path)
    except ModelError as error:
        return Finding(path.stem, error=str(error).removeprefix(f"{path}: "))
    try:
        return found(path.stem, subject)
    finally:
        subject.own.close()


def found(name: str, subject: Subject) -> Finding:
    equal = refused = fitted = told = 0
    differing: dict[str, tuple[str, str]] = {}
    for chat in CHATS:
        theirs = list(dict.fromkeys(expected(subject.text, chat, wants_parts=subject.wants_parts)))
        try:
            ours = subject.rendered(chat)
        except LuceasyncError as error:
            if theirs:
                differing[chat.name] = (f"refused: {error}", theirs[0])
            refused += not theirs
            continue
        if ours in theirs:
            equal += 1
        elif subject.rewrites(chat):
            told += 1
        elif subject.roles_of(chat).one_call and ours in with_one_call_each(subject, chat):
            fitted += 1
        elif theirs:
            differing[chat.name] = (ours, theirs[0])
        else:
            fitted += 1
    answers = subject.answers
    return Finding(
        name,
        equal,
        refused,
        fitted,
        told,
        differing,
        calls=answers.calls.name if answers.calls else "none",
        max_calls=answers.max_calls,
        between=between_of(answers),
        reasoning=reasoning_of(subject),
    )


def between_of(answers: AnswerFormat) -> str | None:
    calls = answers.calls
    return None if calls is None or calls is FORMATS[calls.name] else calls.between


def reasoning_of(subject: Subject) -> str:
    """How the reasoning of an answer to a short chat begins."""
    answers = subject.answers
    if not answers.reasons:
        return "none"
    try:
        is_open = answers.before(subject.rendered(CHATS[0])) == "open"
    except RequestError:  # the template takes no chat without tools
        is_open = False
    begin = answers.words.begin.strip().replace("|", "\\|")
    return f"`{begin}`" + (", in the prompt" if is_open else "")


def unlike(paths: Sequence[Path], digest: Callable[[Path], str]) -> list[Path]:
    """The first of each group of files with the same content."""
    first: dict[str, Path] = {}
    for path in paths:
        first.setdefault(digest(path), path)
    return sorted(first.values(), key=lambda path: path.stem.lower())


def main() -> None:
    """Compare and print."""
    parser = command.parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--differences", action="store_true", help="print both texts")
    parser.add_argument("--only", default="", help="a part of the file's name")
    options = parser.parse_args()
    report = command.open_report(options)
    files = [path for path in options.folder.rglob("*.jinja") if options.only in path.stem]
    findings = [
        find(path) for path in unlike(files, lambda p: hashlib.sha256(p.read_bytes()).hexdigest())
    ]
    columns = ("template", "equal", "refused by both", "fitted", "as text", "differing")
    columns += ("calls", "two calls", "between", "reasoning")
    table = report.table(columns, f"{len(findings)} templates, {len(CHATS)} chats each")
    for finding in findings:
        if finding.error:
            table.add(finding.name, finding.error, *[""] * 8)
            continue
        counts = (finding.equal, finding.refused, finding.fitted, finding.told)
        takes_two = "-" if finding.calls == "none" else "no" if finding.max_calls == 1 else "yes"
        table.add(
            finding.name,
            *map(str, counts),
            ", ".join(finding.differing) or "-",
            finding.calls,
            takes_two,
            "-" if finding.between is None or takes_two != "yes" else f"`{finding.between!r}`",
            finding.reasoning,
        )
    for finding in findings if options.differences else ():
        for chat, (ours, theirs) in finding.differing.items():
            report.say(f"--- {finding.name}: {chat}\n{ours!r}\n{theirs!r}")
    num_differing = sum(bool(finding.differing or finding.error) for finding in findings)
    report.say(f"{len(findings) - num_differing} of {len(findings)} templates render the same")
    sys.exit(1 if num_differing else 0)


if __name__ == "__main__":
    main()
