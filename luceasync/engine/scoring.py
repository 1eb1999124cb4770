"""How probable a prompt's own tokens were, told of each part of it as it is run.

Owns how many tokens are scored at a time: their logits are all there at once. Knows no lanes.
"""

from __future__ import annotations

import math

from luceasync.engine.generation import Generation
from luceasync.engine.sampling.choose import TIE_MARGIN, Ranked
from luceasync.ranking.logits import Logits, Wanted
from luceasync.request import TokenLogprob

SCORED_TOKENS = 128  # in one pass: 77 MB of logits with a vocabulary of 150,000
NUM_KNOWN = 64  # best tokens of a row whose log-probabilities come with it; others are asked for


def scored_end(begin: int, end: int) -> int:
    """Where a part of the chunk `[begin, end)` ends that is scored."""
    return min(end, begin + SCORED_TOKENS)


def score(generation: Generation, begin: int, end: int, logits: Logits) -> None:
    """Give the generation what follows from `logits` [end - begin], those after the prompt's tokens
    `[begin, end)`: of each token behind one of them its log-probability. The first has none, NaN.
    """
    prompt, top = generation.prepared.prompt_ids, generation.prepared.prompt_top_logprobs
    assert top is not None, "its prompt is to be scored"
    if begin == 0:
        tokenizer = generation.prepared.tokenizer
        text, spelled = tokenizer.token_text(prompt[0]), tokenizer.token_bytes(prompt[0])
        generation.scored(TokenLogprob(text, spelled, math.nan))
    wanted = Wanted(num_ranked=NUM_KNOWN, num_top=top + TIE_MARGIN)
    ranking = logits.rank(wanted)
    ranked = Ranked((), logits.num_vocab, ranking, ranking.candidates())
    for row, token in enumerate(prompt[begin + 1 : end + 1]):
        generation.scored(generation.named(token, ranked.logprobs(row, token, top)))
