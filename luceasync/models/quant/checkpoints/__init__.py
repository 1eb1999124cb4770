"""Quantised Hugging Face checkpoints: what `quantization_config` says, and how their tensors become
our encoding. One module per kind of storage; none imports torch at its top.
"""
