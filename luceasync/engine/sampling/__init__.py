"""Turns a row of logits into a token id: edits, ranking, draw.

A new sampling parameter is a field of luceasync.request.Sampling, which luceasync.server reads from
a body. By what it does, it then goes to

row.py             if it changes logits before they are ranked (a bias, a penalty): `is_edited` says
                   when, `edits_of` how; also if it needs more of a sequence than token counts
draw.py            if it filters candidates or draws another way (top_p, min_p); choose._num_ranked
                   says how many candidates it must see. Draws under a mask, too
luceasync.grammar  if it says which tokens may come, as a mask of a row
choose.py          has the order of all of it: what is requested of the logits, and what is chosen

luceasync.ranking has what is done beside the logits, wherever they are. tests/reference/sampler.py
is the same in a few slow lines.
"""
