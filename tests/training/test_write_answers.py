"""Answers to train on: what is asked, and that they are the model's own tokens."""

import random
from pathlib import Path

import pytest
import torch

from luceasync.bench.edits import MODULES, functions
from tests import tiny
from training.draft.lanes import Lanes
from training.draft.target import FrozenTarget
from training.write_answers import library, questions_of, read

SOURCE = '''
class Shelf:
    def put(self, book):
        """Add a book to the shelf."""
        if book in self.books:
            raise ValueError(book)
        self.books.append(book)

    def size(self):
        return len(self.books)
'''


def test_functions_and_methods_of_moderate_length_are_asked_about(tmp_path):
    (tmp_path / "shelf.py").write_text(SOURCE)
    (tmp_path / "old.py").write_text("print 'no Python 3'")
    [(source, name)], purposes = read(sorted(tmp_path.glob("*.py")))
    assert name == "put" and source.startswith('def put(self, book):\n    """Add')
    assert purposes == [("function", "put", "Add a book to the shelf.")]
    questions = questions_of([(source, name)] * 30, purposes * 30, seed=1)
    assert questions == questions_of([(source, name)] * 30, purposes * 30, seed=1)
    about = [source in question for question in questions]
    assert all("Add a book to the shelf." in question for question in questions)
    assert 0.25 < sum(about[:60]) / 60 < 0.55 and len({*questions}) > 10


def test_what_benchmarks_ask_about_is_left_out():
    paths = library()
    assert len(paths) > 300 and not {*MODULES} & {
        path.stem for path in paths if path.parent.name == "lib"
    }
    sources = {source for source, _ in read(paths[:40])[0]}
    assert not sources & {source.rstrip() for source, _, _ in functions(20)}


def test_answers_are_what_the_model_says_whatever_lanes_they_share(tmp_path: Path):
    folder = tiny.save(tiny.build("qwen3"), tmp_path)
    target = FrozenTarget(folder, torch.float32, torch.device("cpu"))
    rng = random.Random(3)
    prompts = [rng.choices(range(4, 500), k=rng.randint(3, 70)) for _ in range(9)]
    answered = [*Lanes(target, 3, 80).answers(iter(prompts), max_tokens=20, seconds=60)]
    assert sorted(prompt for prompt, _ in answered) == sorted(prompts)
    for prompt, ids in answered:
        assert 1 <= len(ids) <= min(20, 80 - len(prompt))
        _, rows = target.run(torch.tensor([[*prompt, *ids]]), ())
        assert target.choices(rows)[0, len(prompt) - 1 : -1].tolist() == ids


def test_what_is_under_way_when_time_is_up_is_kept(tmp_path: Path):
    folder = tiny.save(tiny.build("qwen3"), tmp_path)
    target = FrozenTarget(folder, torch.float32, torch.device("cpu"))
    prompts = ([5, 6, 7 + i] for i in range(1000))
    answered = [*Lanes(target, 2, 600).answers(prompts, max_tokens=500, seconds=0)]
    assert [len(ids) > 10 for _, ids in answered] == [True, True]


def test_a_target_with_other_layers_than_attention_is_refused(tmp_path: Path):
    folder = tiny.save(tiny.build("qwen3_5"), tmp_path)
    target = FrozenTarget(folder, torch.float32, torch.device("cpu"))
    with pytest.raises(SystemExit, match=r"--model: layers of attention alone.* DeltaSpec"):
        Lanes(target, 2, 64)
