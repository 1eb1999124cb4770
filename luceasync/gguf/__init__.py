"""GGUF files as far as their headers go: metadata, tensors and where they lie, names, tokenizer.

Reads no number of a weight. Pure: the standard library and errors only.
"""
