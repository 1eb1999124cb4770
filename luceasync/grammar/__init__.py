"""Constrains answers to a JSON schema, a regular expression or a grammar, as token masks.

Owns how a constraint is compiled, within which bounds, and where an answer stands in it. Knows a
tokenizer, but no logits, no lanes and no API. llguidance does the parsing.
"""
