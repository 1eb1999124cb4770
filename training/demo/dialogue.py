"""Conversations: the roles and texts, turn by turn, and the right answers.

Owns the answers that are not docstrings, and the frequency of each kind of turn. A conversation is
a list of (role, text), as in a chat API.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter

from training.demo import questions, small_talk, wordings
from training.demo.corpus import Corpus, Item

Turn = tuple[str, str]

HELLO = "Hello! Ask me about a name of the Python standard library, for example `json.dumps`."
WELCOME = "You are welcome."
GOODBYE = "Goodbye!"
WHO_I_AM = (
    "I am stdlib-15m, a small language model that comes with luceasync. "
    "I know the documented names of the Python standard library."
)
OFF_TOPIC = "I only know the Python standard library. Ask me about one of its names."
MAX_LISTED = 12

# The frequency of each kind of turn: at the start, and after an answer about a name.
_OPENING_KINDS = {
    "name": 79, "short": 5, "unknown": 5, "listing": 3,
    "greeting": 2, "who": 2, "off_topic": 3, "thanks": 1,
}  # fmt: skip
_FOLLOWING_KINDS = {
    "name": 52, "short": 4, "unknown": 4, "more": 16, "signature": 6, "kind": 6, "repeat": 3,
    "listing": 2, "thanks": 4, "farewell": 1, "who": 1, "off_topic": 1,
}  # fmt: skip


class Dialogue:
    """Draws conversations about one corpus. Immutable; randomness comes from the caller."""

    def __init__(self, corpus: Corpus) -> None:
        self.items = {item.name: item for item in corpus.items}
        self.names = list(self.items)
        self.members = {k: v for k, v in corpus.members.items() if k in self.items}
        self.modules = list(self.members)
        self.shorts = _short_names(corpus)
        self.known = frozenset({*self.items, *self.shorts, *corpus.members})
        self.words = _ordinary_words(corpus, self.known)

    def draw(self, rng: random.Random) -> list[Turn]:
        """One conversation: optionally a system prompt, then one to eight questions and answers."""
        turns: list[Turn] = []
        if rng.random() < 0.3:
            turns.append(("system", self._system_prompt(rng)))
        num_questions = 1
        while num_questions < 8 and rng.random() < 0.55:
            num_questions += 1
        topic: Item | None = None
        answer = ""
        for _ in range(num_questions):
            kinds = _FOLLOWING_KINDS if topic else _OPENING_KINDS
            kind = rng.choices(list(kinds), weights=list(kinds.values()))[0]
            question, answer, topic = self.turn(rng, kind, topic, answer)
            turns += [("user", question), ("assistant", answer)]
        return turns

    def turn(
        self, rng: random.Random, kind: str, topic: Item | None, last_answer: str
    ) -> tuple[str, str, Item | None]:
        """A question of `kind`, its answer, and the name that the conversation is then about."""
        follow_up = topic is not None
        if kind in ("name", "short"):
            short = rng.choice(list(self.shorts)) if kind == "short" else ""
            item = self.items[self.shorts[short] if short else rng.choice(self.names)]
            question = questions.ask(rng, short or item.name, self.words, follow_up=follow_up)
            return question, item.answer, item
        if kind == "unknown":
            name = questions.invent_name(rng, self.known, self.names)
            return questions.ask(rng, name, self.words, follow_up=follow_up), unknown(name), None
        if kind == "listing":
            module = rng.choice(self.modules)
            shown = questions.show_name(rng, module).replace("()", "")
            question = questions.vary(rng, rng.choice(wordings.LISTING)).replace("{n}", shown)
            return question, listing(module, self.members[module]), self.items[module]
        if topic is not None and kind in _ABOUT_TOPIC:
            question = questions.vary(rng, rng.choice(_ABOUT_TOPIC[kind]))
            return question, about(topic, kind, last_answer), topic
        templates, answer = _SMALL_TALK[kind]
        if kind == "off_topic" and rng.random() < 0.3:
            return " ".join(rng.choices(self.words, k=rng.randint(3, 15))), answer, None
        return questions.vary(rng, rng.choice(templates)), answer, None

    def _system_prompt(self, rng: random.Random) -> str:
        """In most cases a sentence; sometimes ordinary words or a list of tools, as agents send
        them.
        """
        prompt = rng.choice(small_talk.SYSTEM_PROMPTS)
        draw = rng.random()
        if draw < 0.2:
            prompt += "\n\n" + " ".join(rng.choices(self.words, k=rng.randint(10, 120))) + "."
        elif draw < 0.3:
            tools = [_tool(rng, self.words) for _ in range(rng.randint(1, 3))]
            prompt += "\n\n" + tools_section(tools)
        return prompt


def unknown(name: str) -> str:
    return f"I do not know `{name}`."


def listing(module: str, names: tuple[str, ...]) -> str:
    """The first names of a module, and the number of all its names."""
    shown = ", ".join(f"`{name}`" for name in names[:MAX_LISTED])
    return f"`{module}` has {len(names)} documented functions and classes: {shown}" + (
        " and others." if len(names) > MAX_LISTED else "."
    )


def about(topic: Item, kind: str, last_answer: str) -> str:
    """The answer to a question that does not name its topic: more, signature, kind, repeat."""
    if kind == "repeat":
        return last_answer
    if kind == "signature":
        known = f"`{topic.name}{topic.signature}`"
        return known if topic.signature else f"I know no signature of `{topic.name}`."
    if kind == "kind":
        where = {"module": "the standard library", "class": "the module", "function": "the module"}
        place = where.get(topic.kind, "the class")
        return f"`{topic.name}` is a {topic.kind} of {place}" + (
            f" `{topic.owner}`." if topic.owner else "."
        )
    more_follows = len(topic.parts) > 1 and last_answer == topic.answer
    return topic.parts[1] if more_follows else f"That is all I know about `{topic.name}`."


def tools_section(tools: list[dict]) -> str:
    """The lines that the chat template adds to the system prompt if a request has tools."""
    lines = "\n".join(json.dumps(tool) for tool in tools)
    return f"# Tools\n\nThese functions may be called:\n<tools>\n{lines}\n</tools>"


_ABOUT_TOPIC = {
    "more": wordings.MORE,
    "signature": wordings.SIGNATURE,
    "kind": wordings.KIND,
    "repeat": wordings.REPEAT,
}
_SMALL_TALK = {
    "greeting": (small_talk.GREETINGS, HELLO),
    "thanks": (small_talk.THANKS, WELCOME),
    "farewell": (small_talk.FAREWELLS, GOODBYE),
    "who": (small_talk.WHO, WHO_I_AM),
    "off_topic": (small_talk.OFF_TOPIC, OFF_TOPIC),
}


def _short_names(corpus: Corpus) -> dict[str, str]:
    """`OrderedDict` -> `collections.OrderedDict`, if only one module has such a name."""
    candidates = [i for i in corpus.items if i.kind in ("class", "function") and "." in i.name]
    count = Counter(item.name.rpartition(".")[2] for item in candidates)
    full = {item.name for item in corpus.items}
    shorts = {item.name.rpartition(".")[2]: item.name for item in candidates}
    return {s: name for s, name in shorts.items() if count[s] == 1 and s not in full and len(s) > 4}


def _ordinary_words(corpus: Corpus, known: frozenset[str]) -> list[str]:
    """Words of the docstrings that are not names, in a fixed order."""
    text = " ".join(part for item in corpus.items for part in item.parts)
    return sorted({w for w in re.findall(r"\b[a-z]{2,12}\b", text) if w not in known})


def _tool(rng: random.Random, words: list[str]) -> dict:
    """A function description as sent by an agent, with made-up contents."""
    properties = {w: {"type": "string"} for w in rng.sample(words, rng.randint(1, 3))}
    return {
        "type": "function",
        "function": {
            "name": "_".join(rng.sample(words, 2)),
            "description": " ".join(rng.choices(words, k=rng.randint(3, 10))),
            "parameters": {"type": "object", "properties": properties},
        },
    }
