"""Finds control tokens in text, and encodes text that merely mentions them.

A control token that is only text is marked by a BREAK inside it, which no client can send: a lone
surrogate is not valid Unicode. Owns the meaning of BREAK. Independent of templates, chats and the
history.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import Any, NamedTuple

import tokenizers
from tokenizers import models

from luceasync.errors import ModelError

BREAK = "\udfff"
_SURROGATES = re.compile(r"[\ud800-\udfff]")
_NO_TOKEN = "\N{REPLACEMENT CHARACTER}"  # replaces a BREAK for readers of valid Unicode


class TokenSpan(NamedTuple):
    """An added token found in a text, at characters `[begin, end)`."""

    begin: int
    end: int
    token_id: int


class ControlTokens:
    """The control tokens of one tokenizer. Thread-safe.

    `encode` uses a copy of the tokenizer in which control tokens are renamed to unguessable marks,
    so that their usual text is ordinary there and every other id is unchanged. Control tokens of
    one character are left out: no BREAK fits inside.
    """

    def __init__(self, backend: tokenizers.Tokenizer, control_ids: Iterable[int]) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._texts = {
            i: added[i].content for i in control_ids if i in added and len(added[i].content) > 1
        }
        self._marks = {i: f"<{secrets.token_hex(16)}.{i}>" for i in self._texts}
        self._scanner = _scanner(backend, added.values())
        self._pattern = _pattern(added.values())
        self._added_ids = {token.content: i for i, token in added.items()}
        contents = [token.content for token in added.values() if token.content]
        is_normalized = backend.normalizer is not None and any(t.normalized for t in added.values())
        # Text without any of these contains no added token; "": unknown, so any text may contain
        # one.
        self._signs = [""] if is_normalized or _NO_TOKEN in "".join(contents) else contents
        self._ids = {
            self._scanner.token_to_id(token.content): i
            for i, token in added.items()
            if token.content
        }

    @property
    def texts(self) -> Collection[str]:
        """The texts of the control tokens."""
        return self._texts.values()

    def is_control(self, token_id: int) -> bool:
        """Whether `token_id` is a control token, which messages must not forge."""
        return token_id in self._texts

    def find_added(self, text: str) -> list[TokenSpan]:
        """The added tokens that encoding `text` would find, control tokens and others, in order."""
        if self._pattern is not None:
            ids = self._added_ids
            return [TokenSpan(*m.span(), ids[m[0]]) for m in self._pattern.finditer(text)]
        if not any(sign in text for sign in self._signs):  # far faster than the scanner
            return []
        readable = _SURROGATES.sub(_NO_TOKEN, text)
        [encoding] = self._scanner.encode_batch([readable], add_special_tokens=False)
        places = zip(encoding.ids, encoding.offsets, strict=True)
        return [TokenSpan(*place, self._ids[i]) for i, place in places if i in self._ids]

    def find(self, text: str) -> list[TokenSpan]:
        """The control tokens that encoding `text` would find, in order."""
        return [token for token in self.find_added(text) if self.is_control(token.token_id)]

    def broken(self, text: str) -> str:
        """`text` with a BREAK inside each control token, which makes it ordinary text."""
        while found := self.find(text):
            text = with_breaks(text, [token.begin + 1 for token in found])
        return text

    def encode(self, text: str) -> list[int]:
        """The ids of `text`; control tokens with a BREAK inside are ordinary text."""
        parts, end = [], 0
        for token in self.find(text):
            parts += [text[end : token.begin], self._marked(token, text)]
            end = token.end
        parts.append(text[end:])
        marked = "".join(parts).replace(BREAK, "")
        [encoding] = self._literal.encode_batch_fast([marked], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def _marked(self, token: TokenSpan, text: str) -> str:
        """The mark of `token`, with any text that a normalized match includes around its name, such
        as a leading space.
        """
        found, name = text[token.begin : token.end], self._texts[token.token_id]
        mark = self._marks[token.token_id]
        return found.replace(name, mark, 1) if name in found else mark

    def prepare(self) -> None:
        """Build the renamed tokenizer in advance; with a large vocabulary, this takes a second.

        Raises ModelError if a token cannot be renamed.
        """
        for token_id, mark in self._marks.items():
            if self._literal.token_to_id(mark) != token_id:
                raise ModelError(
                    f"tokenizer.json gives the control token {self._texts[token_id]!r} two ids"
                )

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        marks = {text: self._marks[i] for i, text in self._texts.items()}
        return tokenizers.Tokenizer.from_str(_renamed(self._backend.to_str(), marks))


def with_breaks(text: str, places: Iterable[int]) -> str:
    """`text` with a BREAK before each of the character indices `places`, which ascend."""
    parts, begin = [], 0
    for place in places:
        parts.append(text[begin:place])
        begin = place
    return BREAK.join([*parts, text[begin:]])


def _pattern(added: Iterable[tokenizers.AddedToken]) -> re.Pattern[str] | None:
    """A pattern that finds the same tokens as the scanner, ten times as fast: the longest at the
    first index. None if a token matches normalized text, or whole words only.
    """
    tokens = [token for token in added if token.content]
    if not tokens or any(token.normalized or token.single_word for token in tokens):
        return None
    longest_first = sorted((token.content for token in tokens), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)))


def _scanner(
    backend: tokenizers.Tokenizer, added: Iterable[tokenizers.AddedToken]
) -> tokenizers.Tokenizer:
    """A tokenizer that finds added tokens like `backend`; any other text becomes one
    unknown token.
    """
    scanner = tokenizers.Tokenizer(models.WordLevel({"": 0}, unk_token=""))
    if backend.normalizer is not None:
        scanner.normalizer = backend.normalizer
    scanner.add_special_tokens(
        [
            tokenizers.AddedToken(
                token.content, single_word=token.single_word, normalized=token.normalized
            )
            for token in added
            if token.content
        ]
    )
    return scanner


def _renamed(definition: str, marks: dict[str, str]) -> str:
    """The tokenizer.json `definition` with the tokens in `marks` renamed wherever they occur."""
    content = json.loads(definition)
    for token in content["added_tokens"]:
        token["content"] = marks.get(token["content"], token["content"])
    model = content["model"]
    model["vocab"] = _renamed_vocab(model["vocab"], marks)
    if "merges" in model:
        model["merges"] = [pair for pair in model["merges"] if not _makes_any(pair, marks)]
    if model.get("unk_token") in marks:
        model["unk_token"] = marks[model["unk_token"]]
    content["post_processor"] = None  # it would add tokens by name; `encode` adds none
    return json.dumps(content)


def _renamed_vocab(vocab: Any, marks: dict[str, str]) -> Any:
    """`vocab` with renamed tokens. It maps tokens to ids or, for Unigram, lists (token, score)
    pairs.
    """
    if isinstance(vocab, dict):
        return {marks.get(token, token): token_id for token, token_id in vocab.items()}
    return [[marks.get(token, token), score] for token, score in vocab]


def _makes_any(pair: Any, marks: dict[str, str]) -> bool:
    """Whether merging `pair`, two tokens or one string of both, uses or produces a
    renamed token.
    """
    left, right = pair.split(" ", 1) if isinstance(pair, str) else pair
    return not marks.keys().isdisjoint((left, right, left + right))
