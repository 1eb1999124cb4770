"""Makes `warm_cache` and the folder `warm` importable, as they are for the script."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
