"""Makes `demo`, the package beside the training script, importable."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
