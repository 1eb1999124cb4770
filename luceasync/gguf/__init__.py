"""Headers of GGUF files: metadata, tensor entries, names of tensors, tokenizer and chat template.

Reads no weights. Pure: imports only the standard library and luceasync's errors.
"""
