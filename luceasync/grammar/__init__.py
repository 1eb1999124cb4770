"""What an answer may say: a schema, an expression or a grammar, as masks over the vocabulary.

Owns how one is compiled, within which bounds, and where an answer stands in it. Knows a tokenizer,
but no logits, no lanes and no API. llguidance does the parsing.
"""
