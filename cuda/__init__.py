"""Numba CUDA kernels, imported as luceasync.cuda."""

if __name__ == "cuda":  # the repository root is on sys.path: let NVIDIA's cuda.bindings through
    __path__ = __import__("pkgutil").extend_path(__path__, __name__)
