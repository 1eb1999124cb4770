"""Triton and CUDA C++ kernels of decode and prefill; models.ops has their torch twins."""
