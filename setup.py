"""Builds one import package, luceasync, from three folders, and compiles cyext/*.pyx."""

import os
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

# cuda/ and cyext/ are folders of this repository, never top-level imports.
FOLDERS = {"luceasync.cyext": "cyext", "luceasync.cuda": "cuda"}
INCLUDED = [str(path) for kind in ("*.h", "*.pxi") for path in sorted(Path("cyext").glob(kind))]
# Sums are rounded as they are written, whichever instructions a machine has.
EXACT = ["-O3", "-ffp-contract=off"]
COMPILER_FLAGS = {"attention": EXACT, "experts": EXACT, "quantised": EXACT, "rows": EXACT}


class BuildInParallel(build_ext):
    """Runs Cython for one module after the other, then a C compiler on each core."""

    def build_extensions(self):
        from Cython.Build import cythonize  # only where something is built

        for extension in self.extensions:
            [in_c] = cythonize([extension], build_dir=self.build_temp)
            extension.sources = in_c.sources
        self.parallel = os.cpu_count()
        super().build_extensions()


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
    cmdclass={"build_ext": BuildInParallel},
)
