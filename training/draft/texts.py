"""From a file of conversations or texts to token ids, with a mark on what the target said.

Owns the file format. The target's own template and tokenizer lay a conversation out, piece by piece
as a server would.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from luceasync.text.template import ChatTemplate
from luceasync.text.tokenizer import Tokenizer

LINES_PER_TASK = 4096


@dataclass(frozen=True, slots=True)
class Text:
    """`ids` int32 [tokens]; `said` bool [tokens]: by the target, end marks included."""

    ids: np.ndarray
    said: np.ndarray


class Layout:
    """Lays lines of a file out in the ids of one model.

    A line is {"messages": [...]}, whose assistant turns were said, perhaps with a last "answer",
    {"text": "..."}, all of which was, or {"ids": [...], "begin": n}, which was from n on.
    """

    def __init__(self, model_dir: Path, eos_ids: Iterable[int], max_tokens: int) -> None:
        self._tokenizer = Tokenizer.load(model_dir)
        self._template = ChatTemplate.load(model_dir)
        self._eos_ids = frozenset(eos_ids)
        self._max_tokens = max_tokens

    def lay(self, line: Mapping[str, Any]) -> Text:
        """Raises ValueError for a line of neither form."""
        if isinstance(line.get("text"), str):
            pieces = [(self._tokenizer.encode(line["text"]), True)]
        elif isinstance(line.get("ids"), list):
            begin = line["begin"]
            pieces = [(line["ids"][:begin], False), (line["ids"][begin:], True)]
        elif isinstance(line.get("messages"), list):
            messages = list(line["messages"])
            if "answer" in line:
                messages.append({"role": "assistant", "content": line["answer"]})
            pieces = list(self._pieces(messages))
        else:
            raise ValueError(
                f"a line with 'messages', 'text' or 'ids' is expected, got {list(line)}"
            )
        ids = [token for piece, _ in pieces for token in piece]
        said = [mark for piece, mark in pieces for _ in piece]
        return Text(
            np.array(ids[: self._max_tokens], dtype=np.int32),
            np.array(said[: self._max_tokens], dtype=bool),
        )

    def prompt(self, line: Mapping[str, Any]) -> list[int]:
        """Ids up to where the target is to speak: all but the last assistant turn."""
        messages = [m for m in line["messages"] if m]
        if messages[-1]["role"] == "assistant":
            messages.pop()
        return self._tokenizer.encode(self._template.render(messages))

    def _pieces(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[list[int], bool]]:
        """(ids, said) one after the other."""
        done = ""
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._template.render(messages[:i])
            spoken = self._template.render(messages[: i + 1], add_generation_prompt=False)
            if not prompt.startswith(done) or not spoken.startswith(prompt):
                raise ValueError("the chat template rewrites earlier turns: give one turn a line")
            yield self._tokenizer.encode(prompt[len(done) :]), False
            answer = self._tokenizer.encode(spoken[len(prompt) :])
            stop = next((at + 1 for at, token in enumerate(answer) if token in self._eos_ids), None)
            yield answer[:stop], True
            if stop is not None:
                yield answer[stop:], False
            done = spoken


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file, a line each."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def read_texts(
    path: Path, model_dir: Path, eos_ids: frozenset[int], max_tokens: int, num_workers: int
) -> list[Text]:
    """Every line of `path` laid out, at most `max_tokens` of each."""
    lines = read_lines(path)
    if num_workers <= 1:
        layout = Layout(model_dir, eos_ids, max_tokens)
        return [layout.lay(line) for line in lines]
    tasks = [lines[at : at + LINES_PER_TASK] for at in range(0, len(lines), LINES_PER_TASK)]
    lay = partial(_lay_lines, model_dir, eos_ids, max_tokens)
    with multiprocessing.get_context("spawn").Pool(num_workers) as pool:
        return [text for texts in pool.imap(lay, tasks) for text in texts]


def _lay_lines(
    model_dir: Path, eos_ids: frozenset[int], max_tokens: int, lines: list[dict[str, Any]]
) -> list[Text]:
    """In a worker process."""
    layout = Layout(model_dir, eos_ids, max_tokens)
    return [layout.lay(line) for line in lines]
