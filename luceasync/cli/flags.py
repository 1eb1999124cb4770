"""Adds the flags of settings to a command, and passes it the Config that they make.

Owns the bridge between options.py and typer; the only reader of os.environ.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from luceasync.options import CONFIG_VARIABLE, OPTIONS, SECTIONS, Option, load_config

POSITIONAL = "model-dir"


def with_config(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the flags of these sections or single options; the command gets the resulting Config as
    its argument `config`.

    Variables and the TOML file may set everything, whichever flags the command has.
    """
    options = [option for option in OPTIONS if {option.section, option.name} & set(names)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(config_path: str | None = None, **values: Any) -> None:
            flags = {option.name: _typed(option, values) for option in options}
            path = config_path or os.environ.get(CONFIG_VARIABLE)
            config = load_config(flags, os.environ, Path(path) if path else None)
            command(config=config, **values)

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = _signature(command, options)  # type: ignore[attr-defined]
        return run

    return decorate


def _signature(command: Callable[..., None], options: list[Option]) -> inspect.Signature:
    """The command's own parameters, with one for each option in place of `config`."""
    own = [
        parameter
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.name != "config"
    ]
    flags = [_parameter(option.key, *_annotation(option)) for option in options]
    flags += [
        _parameter(_no(option), *_off_annotation(option))
        for option in options
        if option.setting.switch
    ]
    flags.append(_parameter("config_path", *_config_annotation()))
    return inspect.Signature([*own, *flags])


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)


def _annotation(option: Option) -> tuple[Any, Any]:
    """Type and default of an option's parameter. Values stay text, except switches: the setting's
    parser reads flags, variables and TOML alike.
    """
    about = _help(option)
    if option.name == POSITIONAL:
        argument = typer.Argument(help=about, metavar="MODEL_DIR", show_default=False)
        return Annotated[str | None, argument], None
    common: Any = {
        "help": about,
        "show_default": False,
        "rich_help_panel": SECTIONS[option.section],
    }
    if option.setting.switch:
        return Annotated[bool | None, typer.Option(option.flag, metavar=" ", **common)], None
    flag = typer.Option(option.flag, metavar=option.setting.metavar, **common)
    kind = list[str] if option.setting.repeatable else str
    return Annotated[kind | None, flag], None


def _off_annotation(option: Option) -> tuple[Any, Any]:
    """`--no-x` beside `--x`: a hidden flag of its own, since a column for both would not fit."""
    return Annotated[bool, typer.Option(f"--no-{option.name}", hidden=True)], False


def _no(option: Option) -> str:
    return f"no_{option.key}"


def _typed(option: Option, values: dict[str, Any]) -> object:
    """Remove what was typed for the option from `values` and return it; None: nothing."""
    typed = values.pop(option.key)
    return False if option.setting.switch and values.pop(_no(option)) else typed


def _help(option: Option) -> str:
    """The setting's help, with the default where the help does not say it."""
    words = option.setting.help
    if option.setting.switch:
        return f"{words} Off: --no-{option.name}."
    if option.default in (None, ()) or option.name == POSITIONAL:
        return words
    return f"{words} (default: {option.default})"


def _config_annotation() -> tuple[Any, Any]:
    about = typer.Option(
        "--config", metavar="FILE", help="TOML file with the same settings.", show_default=False
    )
    return Annotated[str | None, about], None
