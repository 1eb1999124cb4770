"""Constrains answers to a JSON schema, a regular expression or a grammar, as token masks.

Owns the compilation of constraints, its limits, and the state of an answer in its constraint.
Depends on a tokenizer, but not on logits, lanes or an API. llguidance does the parsing.
"""
