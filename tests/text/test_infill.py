"""Prompts whose middle is to be written are in the notation of the model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from luceasync.text.infill import FILE, INFILL, REPOSITORY, InfillParts, InfillTokens, infill_ids

BEFORE, AFTER, MIDDLE, REPO, SEP, PAD = range(900, 906)


def encode(text: str) -> list[int]:
    return list(text.encode())


def vocabulary(*names: str) -> InfillTokens | None:
    found = {name: 900 + i for i, name in enumerate(names)}
    return InfillTokens.of(found.get)


def parts(before: str = "b", after: str = "a", begun: str = "", **files: str) -> InfillParts:
    named = [(encode(f"{name}\n"), encode(text)) for name, text in files.items()]
    return InfillParts(encode(before), encode(after), encode(begun), files=named)


QWEN = vocabulary(*INFILL[0], REPOSITORY[0], FILE[0], "<|fim_pad|>")
PLAIN = vocabulary(*INFILL[0])
AROUND = [BEFORE, *b"b", AFTER, *b"a", MIDDLE]


@pytest.mark.parametrize("names", INFILL)
def test_every_notation_is_found(names: tuple[str, str, str]):
    assert vocabulary(*names) == InfillTokens(BEFORE, AFTER, MIDDLE, frozenset())
    assert vocabulary(*names[:2]) is None


def test_the_next_file_ends_what_is_written():
    assert QWEN is not None and QWEN.ends == {REPO, SEP, PAD}
    assert (QWEN.repository, QWEN.file) == (REPO, SEP)


def test_files_come_first_and_what_is_begun_last():
    made = infill_ids(QWEN, parts(begun="x", f="F", g="G"), encode, 100)
    lead = [REPO, *b"myproject\n", SEP, *b"f\nF", SEP, *b"g\nG", SEP, *b"filename\n"]
    assert made.ids == [*lead, *AROUND, *b"x"]
    assert made.boundaries == (len(lead), len(lead) + len(AROUND))
    assert made.num_left_out == 0


def test_the_models_texts_begin_as_always():
    whole = replace(parts(f="F"), lead=[7])
    without, made = (infill_ids(PLAIN, each, encode, 100) for each in (parts(f="F"), whole))
    assert made.ids == [7, *without.ids]
    assert made.boundaries == tuple(end + 1 for end in without.boundaries)


def test_without_files_there_is_no_repository():
    assert infill_ids(QWEN, parts(), encode, 100).ids == AROUND


def test_files_are_snippets_for_models_without_a_token_for_them():
    made = infill_ids(PLAIN, parts(f="F"), encode, 100)
    assert made.ids == [*b"\n\n--- snippet ---\n\nF", *AROUND]


def test_the_first_files_give_way():
    whole = parts(f="F" * 20, g="G" * 20, h="H" * 20)
    full = infill_ids(QWEN, whole, encode, 1000).ids
    for room in (len(full), len(full) - 1, 60, 40, 0):
        made = infill_ids(QWEN, whole, encode, room)
        assert made.ids[-len(AROUND) :] == AROUND
        kept = [letter for letter in b"FGH" if letter in made.ids]
        assert kept == list(b"FGH")[made.num_left_out :]
        assert len(made.ids) <= max(room, len(AROUND))
    assert infill_ids(QWEN, whole, encode, len(full)).num_left_out == 0
    assert infill_ids(QWEN, whole, encode, len(full) - 1).num_left_out == 1
    assert infill_ids(QWEN, whole, encode, 0).ids == AROUND
