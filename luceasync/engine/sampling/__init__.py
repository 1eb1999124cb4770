"""How a row of logits becomes a token id: wishes, edits, ranking, draw.

A new sampling parameter is a field of luceasync.request.Sampling, read by luceasync.server from a
body, and then, by what it does:

edits.py            changes logits before they are ranked (a bias, a penalty); row.is_edited says
                    when
filter_and_draw.py  leaves candidates out, or draws another way (top_p, min_p); choose._num_ranked
                    says how many candidates it must see
luceasync.grammar   says which tokens may come at all, as a mask of a row
behind.py           draws behind such a mask what was ranked without it, where that is known
row.py              needs more of a sequence than its counts of tokens: what one row brings along
choose.py           the order of all of it: what is wanted of the logits, and what is chosen then

What is done beside the logits, wherever they lie, is in luceasync.ranking.

tests/reference/sampler.py says the same in a few slow lines, and is held against it.
"""
