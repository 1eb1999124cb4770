"""The flags of the warm command, and both ways to keep prompts: by a running server, or by an
engine in this process that writes into the cache directory.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from luceasync.cli.flags import with_config
from luceasync.cli.warm.entries import (
    Form,
    Role,
    Verify,
    parse_kwargs,
    read_entries,
    read_tools,
    with_common,
)
from luceasync.config import Config
from luceasync.errors import ConfigError
from luceasync.options import CONFIG_VARIABLE, load_config

DEFAULT_PARALLEL = 2  # for a server: one prompt is computed while another is restored

Files = Annotated[
    list[str],
    typer.Option(
        help="What to keep; may be repeated; - is stdin. A text is one prompt; JSON is a list of "
        "messages, or an object with messages, tools and chat_template_kwargs; JSONL has one of "
        "these a line.",
        show_default=False,
    ),
]
FormOption = Annotated[
    Form, typer.Option("--format", help="Of the files; auto: .json, .jsonl, else text.")
]
RoleOption = Annotated[Role, typer.Option(help="Whose message a text is.")]
Tools = Annotated[
    Path | None, typer.Option(help="JSON list of tools, for entries that bring none.")
]
Kwargs = Annotated[
    str | None, typer.Option(metavar="JSON", help="Variables for the chat template.")
]
Url = Annotated[str | None, typer.Option(help="A running server, such as http://127.0.0.1:8000.")]
Key = Annotated[
    str | None,
    typer.Option(
        envvar="LUCEASYNC_API_KEY",
        show_envvar=False,
        help="Key of the later requests: each key has prefixes of its own.",
    ),
]
Salt = Annotated[str | None, typer.Option(help="The cache_salt of the later requests.")]
Parallel = Annotated[int | None, typer.Option(min=1, max=1024, help="Prompts at a time.")]
VerifyOption = Annotated[
    Verify, typer.Option(help="Send a request that continues the prompt and check what it finds.")
]
Patience = Annotated[
    float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for a busy server.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]


@with_config("model", "placement", "max-ctx", "prefill-chunk", "cache", "draft")
def warm(
    config: Config,
    file: Files,
    form: FormOption = "auto",
    role: RoleOption = "system",
    tools: Tools = None,
    template_kwargs: Kwargs = None,
    url: Url = None,
    api_key: Key = None,
    cache_salt: Salt = None,
    parallel: Parallel = None,
    verify: VerifyOption = "first",
    patience: Patience = 600.0,
    as_json_: Json = False,
) -> None:
    """Have prompts computed ahead of time, so that no client waits for their prefill.

    A running server does it (--url), or this process, into --kv-cache-dir.

    Run it again to continue: cached prompts are not computed again.
    """
    from luceasync.cli.warm.client import open_directory, open_server
    from luceasync.cli.warm.run import Job, run

    if api_key is not None and "," in api_key:
        raise ConfigError("--api-key: several keys; expected one: each has prefixes of its own")
    entries = with_common(
        [entry for source in file for entry in read_entries(source, form, role)],
        [] if tools is None else read_tools(tools),
        {} if template_kwargs is None else parse_kwargs(template_kwargs),
    )
    if url is None:
        config = _for_directory(config, parallel)
        server = open_directory(config, api_key, cache_salt)
        num_lanes, min_tokens = config.engine.parallel or 1, config.cache.min_tokens
        job = Job(entries, server, num_lanes, verify, min_tokens)
    else:
        _refuse_flags(config)
        server = open_server(url, api_key, cache_salt, patience)
        job = Job(entries, server, parallel or DEFAULT_PARALLEL, verify)
    raise typer.Exit(run(job, as_json_))


def _for_directory(config: Config, parallel: int | None) -> Config:
    """The configuration of an engine that serves no clients. Raises ConfigError."""
    if config.cache.cache_dir is None:
        raise ConfigError("expected --url of a running server, or --kv-cache-dir to write into")
    num_lanes = parallel or config.engine.parallel or 1
    return replace(config, engine=replace(config.engine, parallel=num_lanes))


def _refuse_flags(config: Config) -> None:
    """Raise ConfigError for flags that apply only to an engine in this process."""
    path = os.environ.get(CONFIG_VARIABLE)
    if config != load_config({}, os.environ, Path(path) if path else None):
        raise ConfigError(
            "--url: not allowed with flags of model, placement, cache or draft: a server has its "
            "own; leave out one or the other"
        )
