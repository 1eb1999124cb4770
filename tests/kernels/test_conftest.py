"""What conftest decides before the first test."""

import subprocess
import sys


def test_triton_is_imported_once_it_is_known_whether_there_is_a_gpu():
    """Otherwise kernels would be compiled for a missing GPU when pytest is given a single file.
    Torch, which takes two seconds and imports no Triton, is left out.
    """
    code = """
import sys
sys.modules["torch"] = object()
import tests.kernels.conftest
sys.exit("triton" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
