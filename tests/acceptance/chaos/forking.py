"""luceasync with backends that are forks of one process, which has imported torch: each of them
would take two seconds of a core to do so.

    python -m tests.acceptance.chaos.forking serve ...
"""

from __future__ import annotations

from luceasync.cli.app import main as run
from luceasync.ipc import launcher
from tests.forked_backends import Forks


def main() -> None:
    """Run the command."""
    forks = Forks()
    launcher.subprocess = forks  # type: ignore[assignment]
    try:
        run()
    finally:
        forks.close()


if __name__ == "__main__":
    main()
