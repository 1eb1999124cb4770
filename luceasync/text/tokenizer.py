"""Text to token ids and back, from the files of a Hugging Face model directory, or a GGUF file.

Owns the vocabulary: what each id stands for, which are special, which end a text. Knows no chat.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from luceasync.errors import ContextLengthError, ModelError, RequestError
from luceasync.gguf.model import read_model
from luceasync.gguf.place import gguf_at
from luceasync.gguf.vocabulary import vocabulary_of
from luceasync.process_memory import give_back_freed_memory
from luceasync.text.control_tokens import BREAK, ControlTokens
from luceasync.text.ids_to_text import TextStream, rules_of

# Reads the text files of a model directory, and says in words what is wrong with them. Knows no
# file by name: what a file means is for its reader.


def read_text(path: Path) -> str | None:
    """The UTF-8 text of `path`; None when there is no such file. Raises ModelError when it cannot
    be read.
    """
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ModelError(f"{path} is no regular file")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read as UTF-8 text: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty when there is no such file. Raises ModelError for anything
    else.
    """
    text = read_text(path)
    if text is None:
        return {}
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds a JSON {type(content).__name__}; an object was expected.")
    return content


def special_text(value: Any) -> str | None:
    """The text of a special token as tokenizer_config.json writes it: a string, or an object's
    `content`.
    """
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


SMALL_CHARS = 4096  # milliseconds: less than it takes to let others run
LARGE_CHARS = 1 << 20  # encoding takes a hundred times as many bytes
CHARS_PER_TOKEN = 8  # of a text that is worth a look at its beginning first; most have 2 to 5
CUT_TOKENS = 1024  # more than a cut can add: the longest tokens have some hundred characters


class Tokenizer:
    """A fast tokenizer; `encode` and `decode` may be called from any thread.

    `eos_ids`: the tokens after which a text is over. `vocab_size`: one more than the highest id.
    """

    def __init__(self, definition: str, eos_ids: Iterable[int] = ()) -> None:
        """`definition`: the text of a tokenizer.json. Raises ModelError when it is none."""
        self._backend = _backend(definition)
        self._rules = rules_of(json.loads(definition).get("decoder"))
        self._added = self._backend.get_added_tokens_decoder()
        self._special_texts = {t.content for t in self._added.values() if t.special}
        self._shown: dict[int, str | None] = {}
        self._spelled = _Spelled(self.token_bytes)
        vocab = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.eos_ids = frozenset(eos_ids)

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """The tokenizer of `model_dir`, with the end tokens that any of its files names.

        Raises ModelError for a file that is missing, broken, or names an end token that does not
        exist. `model_dir` may be a GGUF file, or a directory with one, which has it all.
        """
        if (file := gguf_at(model_dir)) is not None:
            vocabulary = vocabulary_of(read_model(file))
            return cls(vocabulary.definition, vocabulary.eos_ids)
        path = model_dir / "tokenizer.json"
        definition = read_text(path)
        if definition is None:
            raise ModelError(f"{path} does not exist; a model directory needs its tokenizer.json.")
        try:
            tokenizer = cls(definition)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from error
        tokenizer.eos_ids = frozenset(_eos_ids(model_dir, tokenizer))
        return tokenizer

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of `text`, nothing added. With `special`, "<|im_end|>" and the like are parsed as
        such, but for those with a BREAK in them; without, they are ordinary text. Raises
        RequestError for text that is not Unicode.
        """
        try:
            text.replace(BREAK, "").encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"The text is not valid Unicode: {error.reason}.") from error
        ids = self._ids_of(text, special)
        if len(text) > LARGE_CHARS:
            give_back_freed_memory()
        return ids

    def _ids_of(self, text: str, special: bool) -> list[int]:
        if not special:
            return self.control.encode(self.control.broken(text))
        if BREAK in text:
            return self.control.encode(text)
        if len(text) < SMALL_CHARS:
            short: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            return short
        # Of its ways to encode this one alone lets other threads run meanwhile.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def least_tokens(self, text: str, most: int) -> int:
        """About how many tokens `text` has at least; exceeds `most` only where it has more.

        No more of the text is encoded than it takes to know: a long one ends with its beginning.
        Around a cut there may be other tokens than in the whole, but not many.
        """
        num_chars = CHARS_PER_TOKEN * most + CUT_TOKENS
        num_least = 0
        while num_chars < len(text) and num_least <= most:
            num_least = len(self.encode(text[:num_chars])) - CUT_TOKENS
            num_chars *= 2
        return max(0, num_least)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens and ids outside the vocabulary have none."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> TextStream:
        """Decodes one sequence token by token; see `shown_token`."""
        return self._rules.stream()

    def shown_token(self, token_id: int) -> str | None:
        """What a stream is to be given for `token_id`; None for a token without text."""
        try:
            return self._shown[token_id]
        except KeyError:
            token = self._token(token_id)
            shown = None if token is None or token in self._special_texts else token
            return self._shown.setdefault(token_id, shown)

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token, a special one's own text included; empty outside the
        vocabulary.
        """
        token = self._token(token_id)
        return b"" if token is None else self._rules.token_bytes(token)

    def spell(self, ids: Iterable[int]) -> bytes:
        """The raw bytes of all of them; quick, since a model says the same tokens again."""
        return b"".join(map(self._spelled.__getitem__, ids))

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself; a part of a character is U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        """The id of `token` as the vocabulary writes it."""
        return self._backend.token_to_id(token)

    @property
    def added_texts(self) -> frozenset[str]:
        """The tokens that `encode` looks for before it splits a text, special or not."""
        return frozenset(token.content for token in self._added.values())

    def is_special(self, token_id: int) -> bool:
        """Whether `token_id` is a control token, which has no text of its own in an answer."""
        return token_id in self._added and self._added[token_id].special

    @cached_property
    def control(self) -> ControlTokens:
        """The special tokens, and those that end a text. The first use takes long."""
        special = {i for i in self._added if self.is_special(i)}
        return ControlTokens(self._backend, special | self.eos_ids)

    def _token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None


class _Spelled(dict[int, bytes]):
    """The bytes of each token, once it was asked for."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        super().__init__()
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> bytes:
        spelled = self[token_id] = self._token_bytes(token_id)
        return spelled


def _backend(definition: str) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the library raises nothing narrower
        raise ModelError(f"not a tokenizer definition: {error}") from error
    # Some files ask for a fixed length; a prompt must be neither cut nor filled up.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _eos_ids(model_dir: Path, tokenizer: Tokenizer) -> set[int]:
    """The union of what generation_config, config and tokenizer_config call the end."""
    config = read_json(model_dir / "config.json")
    sources = {
        "generation_config.json": read_json(model_dir / "generation_config.json"),
        "config.json": config,
        "text_config in config.json": config.get("text_config") or {},
    }
    found = set()
    for source, content in sources.items():
        found.update(_as_ids(content.get("eos_token_id"), model_dir, source))
    tokenizer_config = read_json(model_dir / "tokenizer_config.json")
    text = special_text(tokenizer_config.get("eos_token"))
    if text is not None:
        token_id = tokenizer.token_id(text)
        if token_id is None:
            raise ModelError(
                f"{model_dir}: tokenizer_config.json has the eos_token {text!r}, "
                "which tokenizer.json does not know."
            )
        found.add(token_id)
    return found


def _as_ids(value: Any, model_dir: Path, source: str) -> list[int]:
    ids = value if isinstance(value, list) else [value] if value is not None else []
    if not all(type(token_id) is int for token_id in ids):
        raise ModelError(
            f"{model_dir}: {source} has the eos_token_id {value!r}; "
            "an int or a list of ints was expected."
        )
    return ids


# Whether a text is too long for the context, said before much work is done for it. Owns the
# refusal. Knows no chat and no history.


def refuse_too_long(tokenizer: Tokenizer, text: str, most: int, param: str) -> None:
    """Raise ContextLengthError where `text` certainly has more than `most` tokens. That a text is
    let through says nothing: it may still have more.
    """
    num_least = tokenizer.least_tokens(text, most)
    if num_least > most:
        raise ContextLengthError(most, num_least, param, is_least=True)
