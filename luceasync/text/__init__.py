"""Strings to token ids and back: tokenizer, chat template, incremental text. Independent of
tensors.
"""
