"""Adds the flags of settings to a command, passes it the resulting Config, and reports errors in
the given flags.

Owns the bridge between options.py and typer; the only reader of os.environ.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from luceasync.config import Config
from luceasync.errors import ConfigError
from luceasync.options import CONFIG_VARIABLE, OPTIONS, SECTIONS, Option, load_config

POSITIONAL = "model-dir"

# The exception that typer raises for unknown flags, missing values and similar errors. Typer does
# not export the class.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

# Flags of llama.cpp and vLLM, and their equivalents here.
FOREIGN_FLAGS = {
    **dict.fromkeys(("-m", "--model"), "the model is the first argument, without a flag"),
    **dict.fromkeys(("-hf", "-hfr", "--hf-repo"), "`hf download` gets a model, then name its path"),
    **dict.fromkeys(("-c", "--ctx-size", "--max-model-len"), "--max-ctx is the context of a lane"),
    **dict.fromkeys(("-np", "--max-num-seqs"), "--parallel is the number of lanes"),
    **dict.fromkeys(("-a", "--alias", "--served-model-name"), "--model-name names the model"),
    **dict.fromkeys(("-md", "--model-draft", "--speculative-config"), "--draft names a drafter"),
    **dict.fromkeys(
        ("-b", "-ub", "--batch-size", "--ubatch-size", "--max-num-batched-tokens"),
        "--prefill-chunk is the number of prompt tokens of a step",
    ),
    **dict.fromkeys(
        ("-ngl", "--gpu-layers", "--n-gpu-layers", "-dev", "--device", "--tensor-parallel-size"),
        "--target-devices names the devices; by default all layers go to the best one",
    ),
    **dict.fromkeys(("-ts", "--tensor-split"), "--target-layer-split splits the layers"),
    **dict.fromkeys(("-t", "--threads"), "the variable OMP_NUM_THREADS sets the threads"),
    **dict.fromkeys(("--jinja", "-fa", "--flash-attn"), "leave it out: it is always on"),
    "--gpu-memory-utilization": "leave it out: --max-ctx and --parallel follow from free memory",
}


def with_config(
    *names: str, environ: Mapping[str, str] = os.environ, quiet: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the flags of these sections or single options; the command gets the resulting Config as
    its argument `config`. If `quiet`, no warnings are logged, by settings or later.

    Environment variables, those of `environ`, and the TOML file may set everything, whichever flags
    the command has.
    """
    options = [option for option in OPTIONS if {option.section, option.name} & set(names)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(config_path: str | None = None, **values: Any) -> None:
            if quiet:
                logging.getLogger("luceasync").setLevel(logging.ERROR)
            flags = {option.name: _typed(option, values) for option in options}
            path = config_path or environ.get(CONFIG_VARIABLE)
            config = load_config(flags, environ, Path(path) if path else None)
            try:
                command(config=config, **values)
            except ConfigError as error:
                if path:  # a value in the file is reported without its position
                    error.args = (f"{error} (settings are also read from {path})",)
                raise

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = _signature(command, options)  # type: ignore[attr-defined]
        return run

    return decorate


def config_of(words: Sequence[str], environ: Mapping[str, str]) -> Config:
    """The Config of a command with all flags, called with `words` and `environ`. Raises ConfigError
    or UsageError.
    """
    configs: list[Config] = []

    def take(config: Config) -> None:
        configs.append(config)

    app = typer.Typer(add_completion=False)
    app.command()(with_config(*SECTIONS, environ=environ)(take))
    app(list(words), standalone_mode=False, prog_name="luceasync serve")
    return configs[0]


def usage_words(error: Exception, typed: Sequence[str]) -> str:
    """One line about a UsageError, with the flag that was probably meant; `typed` are the words
    after the program's name.
    """
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "luceasync"
    unknown = getattr(error, "option_name", None)
    if unknown is None or context is None:
        message = error.format_message()  # type: ignore[attr-defined]
        return f"{message.rstrip('.')}; {command} -h shows what is allowed"
    # For -ngl the error names only "-n".
    words = (word.partition("=")[0] for word in typed)
    flag = next((word for word in words if word.startswith(unknown)), unknown)
    known = [name for option in context.command.params for name in option.opts]
    if flag in FOREIGN_FLAGS:
        hint = f"{FOREIGN_FLAGS[flag]}; "
    else:
        near = get_close_matches(flag, [name for name in known if name.startswith("--")], n=1)
        hint = f"did you mean {near[0]}? " if near else ""
    return f"no such flag: {flag}; {hint}{command} -h lists all flags"


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
    """Type and default of an option's parameter. Values stay text, except for switches: the
    setting's parser handles flags, variables and TOML alike.
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
    """`--no-x` beside `--x`: a separate hidden flag, since a column for both would not fit."""
    return Annotated[bool, typer.Option(f"--no-{option.name}", hidden=True)], False


def _no(option: Option) -> str:
    return f"no_{option.key}"


def _typed(option: Option, values: dict[str, Any]) -> object:
    """Remove the option's given value from `values` and return it; None if not given."""
    typed = values.pop(option.key)
    return False if option.setting.switch and values.pop(_no(option)) else typed


def _help(option: Option) -> str:
    """The setting's help, with the default unless the help states it."""
    words = option.setting.help
    if option.setting.switch:
        return f"{words} Off: --no-{option.name}."
    if option.default in (None, ()) or option.name == POSITIONAL:
        return words
    return f"{words} (default: {option.default})"


def _config_annotation() -> tuple[Any, Any]:
    about = typer.Option(
        "--config",
        metavar="FILE",
        help="TOML file with the same settings. Each flag is also a variable: --max-ctx is "
        "LUCEASYNC_MAX_CTX.",
        show_default=False,
    )
    return Annotated[str | None, about], None
