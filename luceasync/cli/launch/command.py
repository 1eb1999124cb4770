"""The flags of the launch command: what is its own, the server's, and the agent's."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from luceasync.cli.launch.agents import AGENTS, KEY_VARIABLE

AGENT_WORDS = "luceasync.agent_words"
PASSES_FLAGS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


class LaunchCommand(TyperCommand):
    """What follows `--` is the agent's, whatever it looks like; flags that are not of this command
    are those of the server that it starts.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        place = args.index("--") if "--" in args else len(args)
        ctx.meta[AGENT_WORDS] = args[place + 1 :]
        return super().parse_args(ctx, args[:place])


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
