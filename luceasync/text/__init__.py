"""Strings to token ids and back: tokenizer, chat template, incremental text. Knows no tensors."""
