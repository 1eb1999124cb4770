"""Text to token ids and back, from the files of a Hugging Face model directory, or a GGUF file.

Owns the vocabulary: what each id means, which are special, which end a text. Independent of chats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from luceasync.errors import ContextLengthError, ModelError, RequestError
from luceasync.gguf.model import GgufModel, read_model
from luceasync.gguf.paths import gguf_at
from luceasync.gguf.vocabulary import vocabulary_of
from luceasync.process_memory import trim_heap
from luceasync.text.control_tokens import BREAK, ControlTokens
from luceasync.text.ids_to_text import TextStream, rules_of
from luceasync.text.infill import InfillTokens

SMALL_CHARS = 4096  # encoded in milliseconds, so the GIL need not be released
LARGE_CHARS = 1 << 20  # encoding takes a hundred times as many bytes
CHARS_PER_TOKEN = 8  # the beginning of a longer text is tried first; most texts have 2 to 5
CUT_TOKENS = 1024  # more than a cut can add: the longest tokens have some hundred characters


class Tokenizer:
    """A fast tokenizer; `encode` and `decode` are thread-safe.

    `eos_ids` are the tokens that end a text. `vocab_size` is the highest id plus one.
    """

    def __init__(self, definition: str, eos_ids: Iterable[int] = ()) -> None:
        """`definition` is the text of a tokenizer.json. Raises ModelError if it is invalid."""
        self._backend = _backend(definition)
        self._rules = rules_of(_decoder_of(self._backend))
        self._added = self._backend.get_added_tokens_decoder()
        self._special_texts = {t.content for t in self._added.values() if t.special}
        self._shown: dict[int, str | None] = {}
        self._bytes = _TokenBytes(self.token_bytes)
        vocab = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        self.eos_ids = frozenset(eos_ids)

    @classmethod
    def load(cls, model_dir: Path, gguf: GgufModel | None = None) -> Tokenizer:
        """The tokenizer of `model_dir`, with the end tokens from all of its files. `model_dir` may
        be a GGUF file, or a directory with one, which contains all of this.

        Raises ModelError for a file that is missing or broken, or an end token that does not exist.
        """
        if gguf is None and (file := gguf_at(model_dir)) is not None:
            gguf = read_model(file)
        if gguf is not None:
            vocabulary = vocabulary_of(gguf)
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
        """The ids of `text`, without added tokens. With `special`, "<|im_end|>" and the like become
        control tokens, unless they contain a BREAK; without, they are ordinary text. Raises
        RequestError for text that is not Unicode.
        """
        try:
            text.replace(BREAK, "").encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"The text is not valid Unicode: {error.reason}.") from error
        ids = self._ids_of(text, special)
        if len(text) > LARGE_CHARS:
            trim_heap()
        return ids

    def _ids_of(self, text: str, special: bool) -> list[int]:
        if not special:
            return self.control.encode(self.control.broken(text))
        if BREAK in text:
            return self.control.encode(text)
        if len(text) < SMALL_CHARS:
            short: list[int] = self._backend.encode(text, add_special_tokens=False).ids
            return short
        # Only the batch calls release the GIL.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def min_tokens(self, text: str, limit: int) -> int:
        """A lower bound on the number of tokens of `text`, precise enough to detect very long
        texts: it exceeds `limit` only if the text does.

        Encodes only as much of the beginning as is needed to exceed `limit`. Around the cut, a few
        tokens may differ from those of the whole text.
        """
        num_chars = CHARS_PER_TOKEN * limit + CUT_TOKENS
        num_tokens = 0
        while num_chars < len(text) and num_tokens <= limit:
            num_tokens = len(self.encode(text[:num_chars])) - CUT_TOKENS
            num_chars *= 2
        return max(0, num_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`; special tokens and ids outside the vocabulary have none."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> TextStream:
        """A decoder of one sequence, token by token, for tokens from `shown_token`."""
        return self._rules.stream()

    def shown_token(self, token_id: int) -> str | None:
        """The token to push into a stream for `token_id`; None if it has no text."""
        try:
            return self._shown[token_id]
        except KeyError:
            token = self._token(token_id)
            shown = None if token is None or token in self._special_texts else token
            return self._shown.setdefault(token_id, shown)

    def special_token(self, token_id: int) -> str | None:
        """The text of a special token; None for other tokens."""
        return self._added[token_id].content if self.is_special(token_id) else None

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token; a special token's own text; empty outside the vocabulary."""
        token = self._token(token_id)
        return b"" if token is None else self._rules.token_bytes(token)

    def spell(self, ids: Iterable[int]) -> bytes:
        """The concatenated bytes of `ids`; fast, since the bytes of each token are cached."""
        return b"".join(map(self._bytes.__getitem__, ids))

    def token_text(self, token_id: int) -> str:
        """The text of a single token; an incomplete character is U+FFFD."""
        return self.token_bytes(token_id).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        """The id of `token`, spelled as in the vocabulary."""
        return self._backend.token_to_id(token)

    @cached_property
    def lead(self) -> str:
        """The control tokens that the model's texts begin with, empty for most models. Chat
        templates write them themselves.
        """
        plain = self._backend.encode("a", add_special_tokens=False).ids
        led = self._backend.encode("a").ids
        starts = range(len(led) - len(plain) + 1)
        begin = next((i for i in starts if led[i : i + len(plain)] == plain), 0)
        return "".join(self.special_token(token_id) or "" for token_id in led[:begin])

    @cached_property
    def infill(self) -> InfillTokens | None:
        """The tokens for fill-in-the-middle prompts; None for models without them."""
        return InfillTokens.of(self.token_id)

    @property
    def special_texts(self) -> frozenset[str]:
        """The special tokens, which have no text in an answer."""
        return frozenset(self._special_texts)

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """The special tokens among `texts`."""
        named = (self.token_id(text) for text in texts if text in self._special_texts)
        return frozenset(token_id for token_id in named if token_id is not None)

    @property
    def added_texts(self) -> frozenset[str]:
        """The tokens that `encode` finds before it splits a text, special or not."""
        return frozenset(token.content for token in self._added.values())

    def is_special(self, token_id: int) -> bool:
        """Whether `token_id` is a special token, which has no text in an answer."""
        return token_id in self._added and self._added[token_id].special

    @cached_property
    def control(self) -> ControlTokens:
        """The special tokens, and those that end a text. The first use is slow."""
        special = {i for i in self._added if self.is_special(i)}
        return ControlTokens(self._backend, special | self.eos_ids)

    def _token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None


def refuse_too_long(tokenizer: Tokenizer, text: str, max_tokens: int, param: str) -> None:
    """Raise ContextLengthError for a text that certainly has more than `max_tokens` tokens, before
    much work is done for it. A text that passes may still have more.
    """
    num_tokens = tokenizer.min_tokens(text, max_tokens)
    if num_tokens > max_tokens:
        raise ContextLengthError(max_tokens, num_tokens, param, is_least=True)


class _TokenBytes(dict[int, bytes]):
    """The bytes of each token, cached on first use."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        super().__init__()
        self._token_bytes = token_bytes

    def __missing__(self, token_id: int) -> bytes:
        token = self[token_id] = self._token_bytes(token_id)
        return token


def _backend(definition: str) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the library raises nothing more specific
        raise ModelError(f"not a tokenizer definition: {error}") from error
    # Some files set a fixed length; a prompt must be neither truncated nor padded.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _decoder_of(backend: tokenizers.Tokenizer) -> Any:
    """The `decoder` of the definition, without parsing a large definition a second time."""
    decoder = backend.decoder
    return None if decoder is None else json.loads(decoder.__getstate__())


def _eos_ids(model_dir: Path, tokenizer: Tokenizer) -> set[int]:
    """The end tokens of generation_config, config and tokenizer_config together."""
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
                "which is not in tokenizer.json."
            )
        found.add(token_id)
    return found


def _as_ids(value: Any, model_dir: Path, source: str) -> list[int]:
    ids = value if isinstance(value, list) else [value] if value is not None else []
    if not all(type(token_id) is int for token_id in ids):
        raise ModelError(
            f"{model_dir}: {source} has the eos_token_id {value!r}; "
            "expected an int or a list of ints."
        )
    return ids


def read_text(path: Path) -> str | None:
    """The UTF-8 text of `path`; None if there is no such file. Raises ModelError if it cannot be
    read.
    """
    if path.exists() and not path.is_file():  # reading a pipe would block
        raise ModelError(f"{path} is not a regular file")
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read as UTF-8 text: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty if there is no such file. Raises ModelError for anything
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
        raise ModelError(f"{path} is a JSON {type(content).__name__}; expected an object.")
    return content


def special_text(value: Any) -> str | None:
    """The text of a special token in tokenizer_config.json: a string, or an object's `content`."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
