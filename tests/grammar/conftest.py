"""Matchers over a tokenizer that has every byte, some words and three control tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from luceasync.grammar.compiler import Compiler, GrammarVocabulary
from luceasync.grammar.matcher import Matcher
from luceasync.grammar.program import compose
from luceasync.grammar.trial import GrammarTrial
from luceasync.request import Constraint
from luceasync.text.tokenizer import Tokenizer
from tests import tiny

NewMatcher = Callable[..., Matcher]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("grammar")
    return Tokenizer.load(tiny.save(tiny.build("qwen3", 1), folder))


@pytest.fixture(scope="session")
def vocabulary(tokenizer: Tokenizer) -> GrammarVocabulary:
    return GrammarVocabulary(tokenizer, tiny.VOCAB_SIZE)


@pytest.fixture
def new_matcher(vocabulary: GrammarVocabulary) -> NewMatcher:
    """`new_matcher("regex", "a+")`: compiled here, without a process."""

    def make(kind: str, source: str, before: str = "nothing") -> Matcher:
        made = compose(Constraint(kind, source, "param"), before=before)
        if kind == "grammar":
            order = {"program": made.text, "limits": {}}
            made = replace(made, text=GrammarTrial().answer(order)["program"])
        return Compiler(vocabulary)._compile(made)

    return make
