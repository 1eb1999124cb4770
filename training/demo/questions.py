"""How a question is drawn: a wording, the name in it, and typing noise.

Randomness comes from the generator that is passed in.
"""

from __future__ import annotations

import random
import re
import string

from training.demo import wordings

_FOREIGN_PACKAGES = (
    "numpy pandas requests flask django scipy torch sklearn matplotlib pytest yaml attrs httpx "
    "fastapi sqlalchemy celery boto3 click rich tqdm pydantic jinja2 redis lxml PIL cv2 tensorflow "
    "jax aiohttp uvicorn starlette bs4 selenium nltk spacy networkx sympy psycopg2 pymongo gevent "
    "twisted tornado"
).split()
_SYLLABLES = (
    "ba co di fro gu ka lim mo nar pel qui ro sta tev ul vex wi xor yan zed ple gra thi".split()
)


def ask(rng: random.Random, name: str, words: list[str], *, follow_up: bool = False) -> str:
    """A question about `name`, worded at random.

    `words` are ordinary words: one question in eight consists of the name among three or more such
    words, which teaches that the name matters and its surroundings do not.
    """
    shown = show_name(rng, name)
    if rng.random() < 0.125 and ("." in name or shown[0] == "`"):
        return _among_words(rng, shown, words)
    core = (
        rng.choice(wordings.FOLLOW_UPS)
        if follow_up and rng.random() < 0.5
        else rng.choice(wordings.CORES)
    )
    opening = rng.choice(wordings.OPENINGS) if rng.random() < 0.4 else ""
    closing = rng.choice(wordings.CLOSINGS) if rng.random() < 0.3 else ""
    return vary(rng, f"{opening}{core}{closing}").replace("{n}", shown)


def show_name(rng: random.Random, name: str) -> str:
    """The name in one of its usual forms: plain, in backticks, with parentheses, in quotes."""
    draw = rng.random()
    called = f"{name}()" if rng.random() < 0.12 else name
    if draw < 0.6:
        return called
    if draw < 0.93:
        return f"`{called}`"
    return f"'{called}'" if draw < 0.97 else f'"{called}"'


def vary(rng: random.Random, template: str) -> str:
    """Typing mistakes, case and punctuation; the placeholder of the name, `{n}`, is not changed."""
    halves = template.split("{n}")
    if rng.random() < 0.5 and halves[0]:
        halves[0] = halves[0][0].upper() + halves[0][1:]
    draw = rng.random()
    if draw < 0.06:
        halves = [half.upper() for half in halves]
    elif draw < 0.2:
        halves = [half.lower() for half in halves]
    if rng.random() < 0.2:
        place = rng.randrange(len(halves))
        halves[place] = mistype(rng, halves[place])
    text = "{n}".join(halves)
    return text.rstrip("?.!") if rng.random() < 0.15 else text


def mistype(rng: random.Random, text: str) -> str:
    """Swap, drop, double or replace one letter; texts of fewer than four characters are not
    changed.
    """
    if len(text) < 4:
        return text
    at = rng.randrange(1, len(text) - 2)
    a, b = text[at], text[at + 1]
    middle = rng.choice((b + a, b, a + a + b, rng.choice(string.ascii_lowercase) + b))
    return text[:at] + middle + text[at + 2 :]


def _among_words(rng: random.Random, shown: str, words: list[str]) -> str:
    drawn = rng.choices(words, k=rng.randint(3, 12))
    drawn.insert(rng.randrange(len(drawn) + 1), shown)
    return " ".join(drawn) + rng.choice(("", "", "?", ".", "!"))


def invent_name(rng: random.Random, known: frozenset[str], names: list[str]) -> str:
    """A name that is not in the standard library: misspelt, misplaced, foreign or made up."""
    while True:
        draw = rng.random()
        real, other = rng.choice(names), rng.choice(names)
        head, _, last = real.rpartition(".")
        if draw < 0.3:
            name = f"{head}.{mistype(rng, last)}" if head else mistype(rng, last)
        elif draw < 0.65 and head:
            name = f"{head}.{other.rpartition('.')[2]}"
        elif draw < 0.85:
            name = f"{rng.choice(_FOREIGN_PACKAGES)}.{last}"
        else:
            made_up = "".join(rng.choices(_SYLLABLES, k=rng.randint(2, 4)))
            name = f"{head}.{made_up}" if head and rng.random() < 0.5 else made_up
        if name not in known:
            return name


def could_be_drawn(template: str) -> bool:
    """Whether opening, core or follow-up, and closing can make a question like `template`."""
    wanted = _normal(template)
    return any(
        wanted == _normal(f"{opening}{core}{closing}")
        for core in (*wordings.CORES, *wordings.FOLLOW_UPS, *wordings.LISTING)
        for opening in ("", *wordings.OPENINGS)
        for closing in ("", *wordings.CLOSINGS)
    )


def _normal(text: str) -> str:
    """Only letters and the placeholder of the name, without differences in case, punctuation and
    spaces.
    """
    return re.sub(r"[^a-z{}]", "", text.lower())
