"""A luceasync-backend on CPUs that have slots for experts, as a GPU has.

python -m tests.pipeline.slotted_backend ARGUMENT...
"""

from __future__ import annotations

import pytest


def have_slots(patch: pytest.MonkeyPatch) -> None:
    """Give the CPUs of this process slots."""
    from luceasync.pipeline import devices, stage
    from tests.kernels.experts_double import SlottedPlatform, replace_kernels

    replace_kernels(patch)
    patch.setattr(stage, "open_platform", SlottedPlatform)
    patch.setattr(devices, "open_platform", SlottedPlatform)


if __name__ == "__main__":
    from luceasync.backend.app import main

    with pytest.MonkeyPatch.context() as slots:
        have_slots(slots)
        main()
