"""Quantised Hugging Face checkpoints: what `quantization_config` specifies, and how their tensors
are converted to our encoding. One module per kind of storage; none imports torch at its top."""
