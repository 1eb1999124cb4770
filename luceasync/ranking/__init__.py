"""Logits stay where they are; what comes of them are candidates.

Owns the half of sampling that is done beside the logits: edits, ranking, mass, log-probabilities.
What is wanted comes as plain data, what is found goes as plain data. Knows no request, no lane and
no shard.
"""
