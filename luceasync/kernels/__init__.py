"""Triton kernels of the decode step and of prefill, each beside its torch twin in models.ops."""
