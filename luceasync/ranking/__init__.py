"""Ranks logits where they are, so that only candidates come to the host.

Owns the half of sampling that is done beside the logits: edits, masks, ranking, mass and
log-probabilities. Requests and results are plain data. Does not know requests, lanes or shards.
"""
