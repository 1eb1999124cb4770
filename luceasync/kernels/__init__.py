"""Triton and CUDA C++ kernels for decode and prefill; models.ops has the same operations in
torch."""
