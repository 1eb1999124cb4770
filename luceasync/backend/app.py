"""The program luceasync-backend: its arguments, its greeting, its end.

Writes only log lines, to standard error, and ends when the process that started it is gone. With
--listen it waits for a server on another machine instead.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, Protocol

from luceasync.errors import ChannelClosed, ConfigError, LuceasyncError
from luceasync.ipc.tcp import SCHEME, Address, parse_url

GREETING_S = 60.0
EXIT_FAILED, EXIT_USAGE = 1, 2

log = logging.getLogger(__name__)


class Backend(Protocol):
    """The work of a process, from the greeting to the end; see stage.py and draft.py."""

    def run(self) -> None:
        """Run commands. Raises ChannelClosed when the parent is gone."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point."""
    arguments = parse(argv)
    logging.basicConfig(level="INFO", stream=sys.stderr, format="%(levelname)s %(message)s")
    logging.getLogger("numba").setLevel(logging.WARNING)  # it reports each step of its compiler
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # read by torch; see luceasync.cli.app
    try:
        _run(arguments)
    except ChannelClosed as error:
        log.info("the end: %s", error)
    except LuceasyncError as error:
        print(f"luceasync-backend: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    except Exception:
        log.exception("luceasync-backend has failed")
        sys.exit(EXIT_FAILED)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Exit with one line, without the usage."""
        self.exit(EXIT_USAGE, f"luceasync-backend: {message}\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments; exits on a wrong one."""
    parser = _Parser(
        prog="luceasync-backend",
        description="Runs layers of a model, or a drafter, for luceasync, which starts it "
        "(--target-shard-ipc-bin, --draft-ipc-bin), in a Python environment of its own.",
    )
    parser.add_argument(
        "--offer",
        action="append",
        default=[],
        type=_renamed,
        metavar="NAME=DEVICE",
        help="offer DEVICE of this machine under another NAME, such as hip:0=cpu:0; repeatable",
    )
    parser.add_argument(
        "--listen",
        type=_address,
        metavar="HOST:PORT",
        help="wait there for a server on another machine, which names tls://HOST:PORT in "
        "--target-shard-ipc-bin; needs --tls",
    )
    parser.add_argument(
        "--tls", type=Path, metavar="FILE", help="this machine's file of `luceasync pair`"
    )
    parser.add_argument(
        "--model-dir",
        type=Path,
        metavar="DIR",
        help="with --listen: the model's directory here, if the server has it elsewhere; otherwise "
        "set by luceasync, as is what follows",
    )
    parser.add_argument("--wait", action="store_true", help="set by luceasync")
    parser.add_argument("--connect", type=_address, help="set by luceasync")
    parser.add_argument("--connect-ray", default="", help="set by luceasync")
    parser.add_argument("--name", default="", help="set by luceasync")
    parser.add_argument("--place", default="", help="set by luceasync")
    parser.add_argument("--patience", type=float, default=5.0, help="set by luceasync")
    parser.add_argument("--weights", default="", help="set by luceasync")
    parser.add_argument("--draft-dir", type=Path, help="set by luceasync")
    parser.add_argument("--dtype", default="", help="set by luceasync")
    parser.add_argument("--layers", default="", help="set by luceasync")
    arguments = parser.parse_args(argv)
    names = [name for name, _ in arguments.offer]
    if twice := {name for name in names if names.count(name) > 1}:
        parser.error(f"argument --offer: {', '.join(sorted(twice))} is named twice")
    if arguments.tls is None and (arguments.listen or arguments.connect or arguments.connect_ray):
        parser.error("argument --listen: it needs --tls FILE, a file of `luceasync pair`")
    return arguments


def _address(text: str) -> Address:
    try:
        return parse_url(f"{SCHEME}://{text}")
    except ConfigError:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT") from None


def _renamed(text: str) -> tuple[str, str]:
    from luceasync.errors import PlacementError
    from luceasync.pipeline.shard_plan import check_devices

    name, _, device = text.partition("=")
    try:
        [full, real] = [check_devices([part], "--offer")[0] for part in (name, device)]
    except PlacementError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return full, real


def _run(arguments: argparse.Namespace) -> None:
    if arguments.wait:
        import luceasync.backend.stage  # noqa: F401  # what takes long, before it is needed
        from luceasync.backend.listen import wait_for_assignment

        told = wait_for_assignment()
        if told is None:
            return
        offers = arguments.offer
        arguments = parse(told)
        arguments.offer = offers
    if arguments.listen or arguments.connect or arguments.connect_ray:
        _run_link(arguments)
        return
    backend = _open_stage(arguments) if arguments.draft_dir is None else _open_draft(arguments)
    try:
        backend.run()
    finally:
        backend.close()


def _run_link(arguments: argparse.Namespace) -> None:
    from luceasync.backend.bring import Box, bring
    from luceasync.backend.listen import EXIT_LOST, serve_host

    if arguments.listen is not None:
        serve_host(arguments.listen, arguments.tls, arguments.offer, arguments.model_dir)
        return
    layers = arguments.model_dir, arguments.dtype, arguments.layers
    box = Box(arguments.connect, arguments.name, arguments.tls, arguments.place, arguments.patience)
    if arguments.connect_ray:
        from luceasync.ipc.ray_launcher import RayLauncher, parse_ray_url

        offers = [f"--offer={name}={device}" for name, device in arguments.offer]
        launcher = RayLauncher(parse_ray_url(arguments.connect_ray), arguments.tls, offers)
        try:
            found = launcher.launch()
            box = replace(box, address=Address(found.host, found.port), name=found.machine)
            words = bring(box, *layers)
        finally:
            launcher.close()
    else:
        words = bring(box, *layers)
    print(words, file=sys.stderr)
    sys.exit(EXIT_LOST)


def _open_stage(arguments: argparse.Namespace) -> Backend:
    """Greet the parent, then import what runs a stage."""
    from luceasync.ipc.channel import Statement, be_greeted
    from luceasync.ipc.wiring import connect_to_parent
    from luceasync.models.files import ModelFiles
    from luceasync.pipeline.remote.agreement import states_of
    from luceasync.pipeline.remote.wire import COMMANDS

    parent = connect_to_parent(COMMANDS)
    model = None if arguments.model_dir is None else ModelFiles(arguments.model_dir)
    states = {}
    if model is not None:
        states = states_of(model, arguments.dtype, arguments.layers, arguments.weights)
    be_greeted(parent.channel, Statement(states), GREETING_S)
    from luceasync.backend.stage import StageBackend

    return StageBackend(parent, model, dict(arguments.offer))


def _open_draft(arguments: argparse.Namespace) -> Backend:
    """Greet the parent, then import what runs a drafter."""
    from luceasync.ipc.channel import Statement, be_greeted
    from luceasync.ipc.wiring import connect_to_parent
    from luceasync.pipeline.remote.agreement import draft_states_of
    from luceasync.speculation.dflash.wire import COMMANDS

    parent = connect_to_parent(COMMANDS)
    states = draft_states_of(arguments.draft_dir, arguments.dtype)
    be_greeted(parent.channel, Statement(states), GREETING_S)
    from luceasync.backend.draft import DraftBackend

    return DraftBackend(parent, arguments.draft_dir, dict(arguments.offer))
