"""Numba CUDA kernels, imported as luceasync.cuda."""

if (
    __name__ == "cuda"
):  # with the repository root on sys.path this package would hide NVIDIA's cuda.bindings
    __path__ = __import__("pkgutil").extend_path(__path__, __name__)
