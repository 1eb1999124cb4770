"""Prompts for fill-in-the-middle, in the notation that a code model was trained with.

Owns the tokens of each notation, the order of the parts, and which files are left out when the
context is too small. Independent of requests and answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

# The tokens before the part that comes first, before the part that comes last, and before the
# generated middle, by the models that were trained with them.
INFILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
)
# Tokens that end the middle, in addition to those that end a text.
INFILL_ENDS = (
    *("<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|cursor|>"),
    *("<fim_pad>", "<fim-pad>", "<reponame>", "<repo_name>", "<file_sep>", "<filename>"),
    "\u2581<EOT>",
)
# Tokens before the name of a repository, and before that of each of its files.
REPOSITORY = ("<|repo_name|>", "<repo_name>", "<reponame>")
FILE = ("<|file_sep|>", "<file_sep>", "<filename>")
# llama.cpp's documented defaults for names that clients do not send.
REPOSITORY_NAME, OWN_NAME = "myproject\n", "filename\n"
SNIPPET = "\n\n--- snippet ---\n\n"  # before each file, for models without a token for them

Encode = Callable[[str], list[int]]
Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class InfillTokens:
    """The tokens of a fill-in-the-middle prompt; any of `ends` ends the middle. `repository` and
    `file` precede their names; None for models without such tokens.
    """

    before: int
    after: int
    middle: int
    ends: frozenset[int]
    repository: int | None = None
    file: int | None = None

    @classmethod
    def of(cls, token_id: Callable[[str], int | None]) -> InfillTokens | None:
        """The tokens of the vocabulary in which `token_id` looks up a token; None if it has none
        for infill.
        """
        for names in INFILL:
            before, after, middle = map(token_id, names)
            if before is not None and after is not None and middle is not None:
                ends = {found for found in map(token_id, INFILL_ENDS) if found is not None}
                repository, file = _first(token_id, REPOSITORY), _first(token_id, FILE)
                return cls(before, after, middle, frozenset(ends), repository, file)
        return None


def _first(token_id: Callable[[str], int | None], names: Sequence[str]) -> int | None:
    return next((found for found in map(token_id, names) if found is not None), None)


@dataclass(frozen=True, slots=True)
class InfillParts:
    """The token ids of a prompt's texts: `before` and `after` the middle, its beginning `begun`,
    and the name and text of each file, the least important file first. `lead` are the tokens that
    the model's texts begin with.
    """

    before: Ids
    after: Ids
    begun: Ids = ()
    lead: Ids = ()
    files: Sequence[tuple[Ids, Ids]] = ()


@dataclass(frozen=True, slots=True)
class InfillIds:
    """A whole prompt. `boundaries` are the ends of the files, and the beginning of the middle.
    `num_left_out` is the number of files that did not fit.
    """

    ids: list[int]
    boundaries: tuple[int, ...]
    num_left_out: int


def infill_ids(tokens: InfillTokens, parts: InfillParts, encode: Encode, room: int) -> InfillIds:
    """The prompt of `parts`. The first files are left out if it would exceed `room` tokens; the
    other parts may exceed `room`. The beginning of the middle comes last, so that prompts in which
    only that part grows share everything before it.
    """
    around = [tokens.before, *parts.before, tokens.after, *parts.after, tokens.middle]
    room -= len(parts.lead) + len(around) + len(parts.begun)
    files, num_left_out = _files(tokens, parts.files, encode, room)
    before = [*parts.lead, *files]
    ids = [*before, *around, *parts.begun]
    ends = (len(before), len(before) + len(around))
    boundaries = tuple(end for end in ends if 0 < end < len(ids))
    return InfillIds(ids, boundaries, num_left_out)


def _files(
    tokens: InfillTokens, files: Sequence[tuple[Ids, Ids]], encode: Encode, room: int
) -> tuple[list[int], int]:
    """The last of `files` that fit into `room` tokens, and the number of files left out."""
    if not files:
        return [], 0
    lead = [] if tokens.repository is None else [tokens.repository, *encode(REPOSITORY_NAME)]
    own = [] if tokens.file is None else [tokens.file, *encode(OWN_NAME)]
    snippet = encode(SNIPPET) if tokens.file is None else []
    kept: list[list[int]] = []
    room -= len(lead) + len(own)
    for name, text in reversed(files):
        whole = [*snippet, *text] if tokens.file is None else [tokens.file, *name, *text]
        room -= len(whole)
        if room < 0:
            break
        kept.append(whole)
    if not kept:
        return [], len(files)
    ids = [*lead, *(token for whole in reversed(kept) for token in whole), *own]
    return ids, len(files) - len(kept)
