"""Answers to train on: what is asked, and that they are the model's own tokens."""

import argparse
import io
import json
from pathlib import Path

import pytest
import torch

from luceasync.bench.edits import MODULES, functions
from tests import tiny
from training.draft.target import FrozenTarget
from training.write_answers import functions_of, library, questions_of, write

SOURCE = '''
class Shelf:
    def put(self, book):
        """Add a book."""
        if book in self.books:
            raise ValueError(book)
        self.books.append(book)

    def size(self):
        return len(self.books)
'''


def test_functions_and_methods_of_moderate_length_are_asked_about(tmp_path):
    (tmp_path / "shelf.py").write_text(SOURCE)
    (tmp_path / "old.py").write_text("print 'no Python 3'")
    [(source, name)] = functions_of(sorted(tmp_path.glob("*.py")))
    assert name == "put" and source.startswith('def put(self, book):\n    """Add')
    questions = questions_of([(source, name)] * 30, seed=1)
    assert questions == questions_of([(source, name)] * 30, seed=1)
    assert all(source in question for question in questions) and len({*questions}) > 5


def test_what_benchmarks_ask_about_is_left_out():
    paths = library()
    assert len(paths) > 300 and not {*MODULES} & {
        path.stem for path in paths if path.parent.name == "lib"
    }
    sources = {source for source, _ in functions_of(paths[:40])}
    assert not sources & {source.rstrip() for source, _, _ in functions(20)}


@pytest.mark.slow
async def test_answers_are_what_the_model_says(tmp_path: Path):
    folder = tiny.save(tiny.build("qwen3"), tmp_path)
    args = argparse.Namespace(
        model=folder,
        dtype="fp32",
        device="cpu",
        parallel=2,
        row_tokens=64,
        answer_tokens=8,
        seconds=60,
    )
    out, prompts = io.StringIO(), [[5, 6, 7, 8], [9, 10, 11], [40, 41]]
    await write(args, prompts, out)
    lines = sorted(map(json.loads, out.getvalue().splitlines()), key=lambda line: -line["begin"])
    target = FrozenTarget(folder, torch.float32, torch.device("cpu"))
    for line, prompt in zip(lines, prompts, strict=True):
        ids, begin = line["ids"], line["begin"]
        assert ids[:begin] == prompt and 1 <= len(ids) - begin <= 8
        _, rows = target.run(torch.tensor([ids]), ())
        assert target.choices(rows)[0, begin - 1 : -1].tolist() == ids[begin:]
