"""What is known before the first test."""

import subprocess
import sys


def test_triton_is_imported_once_it_is_known_whether_there_is_a_gpu():
    """Else kernels are compiled for a GPU that is not there, where a file is named to pytest."""
    code = "import sys, tests.kernels.conftest; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
