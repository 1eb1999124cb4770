"""Headers of GGUF files: metadata, tensor entries, names of tensors, tokenizer and chat template.

Reads no weights. Pure: the standard library and errors only.
"""
