"""Builds one import package, luceasync, from three folders, and compiles cyext/*.pyx."""

from pathlib import Path

from setuptools import Extension, find_packages, setup

# cuda/ and cyext/ are folders of this repository, never top-level imports.
FOLDERS = {"luceasync.cyext": "cyext", "luceasync.cuda": "cuda"}
INCLUDED = [str(path) for kind in ("*.h", "*.pxi") for path in sorted(Path("cyext").glob(kind))]
# Sums are rounded as they are written, whichever instructions a machine has.
EXACT = ["-O3", "-ffp-contract=off"]
COMPILER_FLAGS = {"attention": EXACT, "quantised": EXACT, "rows": EXACT}

setup(
    packages=[*find_packages(include=["luceasync", "luceasync.*"]), *FOLDERS],
    package_dir=FOLDERS,
    package_data={
        "luceasync": ["py.typed", "assets/**"],
        "luceasync.kernels": ["*.cu", "*.cuh"],
        "luceasync.server": ["web/**"],
        "luceasync.cyext": ["*.h", "*.pxi", "*.pyi"],
    },
    ext_modules=[
        Extension(
            f"luceasync.cyext.{path.stem}",
            [str(path)],
            include_dirs=["cyext"],
            depends=INCLUDED,
            extra_compile_args=COMPILER_FLAGS.get(path.stem, []),
        )
        for path in sorted(Path("cyext").glob("*.pyx"))
    ],
    options={"build_ext": {"cython_c_in_temp": True}},
)
