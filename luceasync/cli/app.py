"""The command line: its commands and exit codes. Each command's work is in its own module.

Imports neither torch nor the engine, so that --help is fast; commands import what they need.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from luceasync import __version__
from luceasync.cli.bench import bench_app
from luceasync.cli.cache import cache_app
from luceasync.cli.cluster import cluster_app
from luceasync.cli.flags import UsageError, usage_words, with_config
from luceasync.cli.launch.agents import AGENTS, KEY_VARIABLE
from luceasync.cli.output import one_line
from luceasync.cli.warm.command import warm
from luceasync.config import Config
from luceasync.errors import LuceasyncError
from luceasync.options import SECTIONS

EXIT_BROKEN, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
ENGINE_SECTIONS = [name for name in SECTIONS if name != "server"]  # for commands without a server
AGENT_WORDS = "luceasync.agent_words"
PASSES_FLAGS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    name="luceasync",
    help="A local LLM server that prefills a prompt once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cache_app)
app.add_typer(bench_app)
app.add_typer(cluster_app)


def main() -> None:
    """The entry point. A setting that cannot be honoured causes one line on stderr and
    exit code 2.
    """
    # How long OpenMP threads spin at a barrier before they sleep. The default is so long that any
    # other busy process slows decoding by an order of magnitude; not spinning at all halves the
    # speed on an idle machine. Torch reads it on import.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    try:
        sys.exit(app(standalone_mode=False))
    except UsageError as error:
        if str(error):
            print(f"luceasync: {one_line(usage_words(error, sys.argv[1:]))}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    except typer.Abort:
        print("luceasync: aborted", file=sys.stderr)
        sys.exit(EXIT_BROKEN)
    except LuceasyncError as error:
        # Those of a process carry its last lines.
        words = " ".join(line.strip() for line in str(error).splitlines())
        print(f"luceasync: {one_line(words)}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def die_on_ctrl_c() -> None:
    """Let Ctrl-C end the process immediately, until a command handles it: importing torch and
    reading weights are long native calls, which KeyboardInterrupt does not interrupt.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"luceasync {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_show_version, is_eager=True, help="Show the version."
        ),
    ] = False,
) -> None:
    pass


@app.command()
@with_config(*SECTIONS)
def serve(config: Config) -> None:
    """Serve a model over HTTP with the APIs of OpenAI and Anthropic."""
    from luceasync.cli.serve import check_serve, run_server

    model = check_serve(config)
    die_on_ctrl_c()
    run_server(config, model)


@app.command()
@with_config(*ENGINE_SECTIONS)
def chat(
    config: Config,
    url: Annotated[
        str | None,
        typer.Option(
            help="A running server, such as http://127.0.0.1:8000; default: run the model here."
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="LUCEASYNC_API_KEY",
            help="API key for that server; prefer LUCEASYNC_API_KEY.",
            show_envvar=False,
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens of an answer; default: what the context holds."),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 is greedy.")] = 0.6,
) -> None:
    """Chat in the terminal. /help lists commands, /quit ends, Ctrl-C stops an answer."""
    from luceasync.cli.serve import check_load

    model = None
    if url is None:
        model = check_load(config)
        die_on_ctrl_c()
    from luceasync.cli.chat.conversation import run_chat
    from luceasync.cli.chat.responders import AnswerOptions, open_local, open_remote

    responder = open_local(config, model) if url is None else open_remote(url, api_key)
    answered_all = run_chat(responder, system, AnswerOptions(max_tokens, temperature))
    raise typer.Exit(0 if answered_all else EXIT_BROKEN)


@app.command()
@with_config(*SECTIONS)
def doctor(config: Config) -> None:
    """Show what this machine has, what would be used, and what is wrong."""
    from luceasync.cli.doctor import run_doctor

    raise typer.Exit(0 if run_doctor(config) else EXIT_BROKEN)


@app.command()
@with_config(quiet=True)  # errors in its settings are in the server's own log
def health(config: Config) -> None:
    """Check whether the server on this machine is ready; exit with 1 if not.

    If several are running, or none is found, variables and the file name the server's address.
    """
    import psutil

    from luceasync.cli.health import run_health, running_server

    server = running_server(list(psutil.process_iter())) or config.server
    raise typer.Exit(0 if run_health(server) else EXIT_BROKEN)


@app.command()
@with_config(*ENGINE_SECTIONS)
def plan(
    config: Config,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show bytes per device and lane, and what fits, without loading the model."""
    from luceasync.cli.serve import check_plan

    model = check_plan(config)
    from luceasync.cli.plan import run_plan

    run_plan(config, as_json, model)


@app.command()
def pair(
    names: Annotated[
        list[str], typer.Argument(help="Names of machines, such as box1 box2.", metavar="NAME...")
    ],
    folder: Annotated[
        Path, typer.Option(help="Where the authority is, or will be.", metavar="DIR")
    ] = Path("~/.config/luceasync/machines"),
) -> None:
    """Make the certificates with which machines trust each other: one file for each name."""
    from luceasync.ipc.certificates import make_pair

    for file in make_pair(folder.expanduser(), names):
        print(file)


app.command()(warm)


class LaunchCommand(TyperCommand):
    """Everything after `--` belongs to the agent, whatever it looks like; flags that this command
    does not have are those of the server that it starts.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        place = args.index("--") if "--" in args else len(args)
        ctx.meta[AGENT_WORDS] = args[place + 1 :]
        return super().parse_args(ctx, args[:place])


@app.command(cls=LaunchCommand, context_settings=PASSES_FLAGS_ON)
def launch(
    ctx: typer.Context,
    agent: Annotated[
        str,
        typer.Argument(help=f"One of {', '.join(AGENTS)}.", metavar="AGENT", show_default=False),
    ],
    url: Annotated[
        str | None,
        typer.Option(help="A running server; default: the one that runs on this machine."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=KEY_VARIABLE,
            help=f"API key for the server; prefer {KEY_VARIABLE}.",
            show_envvar=False,
        ),
    ] = None,
    only_print: Annotated[
        bool, typer.Option("--print", help="Print the settings as a shell script, and end.")
    ] = False,
) -> None:
    """Start a coding agent, set up for a server here: luceasync launch claude -- ARGS.

    AGENT may be followed by a model and any flags of luceasync serve: then a server is started,
    which ends with the agent. The agent's own configuration is not changed.
    """
    from luceasync.cli.launch.run import run_launch

    words = ctx.meta[AGENT_WORDS]
    raise typer.Exit(run_launch(agent, words, ctx.args, url, api_key, only_print=only_print))
