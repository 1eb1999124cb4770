"""Run the acceptance checks one after the other, each in its own process.

    python -m tests.acceptance [--list] [--only check_turns,soak] [--short] [--folder DIR]

`--short` runs a small selection of each. Checks whose requirements are missing are skipped. Exit
status 1 if one failed. `python -m tests.acceptance.NAME --help` shows a check's own flags.
"""

from __future__ import annotations

import argparse
import inspect
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from luceasync.bench.servers import server

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Check:
    """A program of this package. `args`: always passed; `short`: passed for a quick run; `needs`:
    flags of this command without which the check is skipped.
    """

    name: str
    what: str
    args: tuple[str, ...] = ()
    short: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        return f"tests.acceptance.{self.name.partition(':')[0]}"


CHECKS = (
    Check(
        "check_turns",
        "conversations find their prefixes again, also after kills and restarts",
        short=("chat", "--models", "attention", "--templates", "qwen3", "--chunks", "256"),
    ),
    Check(
        "check_sessions",
        "long sessions run nothing again in a third of their memory",
        short=("--steps", "5", "--kinds", "parts"),
    ),
    Check(
        "check_lossless",
        "speculation changes no token of a greedy answer",
        short=("--targets", "bundled", "--prompts", "4", "--others", "2"),
    ),
    Check(
        "check_processes",
        "prefixes move between one, two and three processes",
        short=("--tokens", "10", "--pairs", "one:three", "--transports", "shared"),
    ),
    Check(
        "check_cluster",
        "layers on another machine, whose link is cut",
        short=("--parts", "numbers"),
    ),
    Check(
        "check_routers",
        "conversations over several servers behind routers of the field",
        ("{folder}",),
        ("--servers", "2", "--conversations", "8", "--turns", "4", "--only", "smg, cache"),
        ("folder",),
    ),
    Check(
        "check_ray",
        "servers and stages on a Ray cluster of two nodes; skipped without Ray",
        short=("--parts", "errors"),
    ),
    Check(
        "check_grammar",
        "answers to random schemas keep to them, however drafted",
        short=("--schemas", "4", "--families", "qwen3"),
    ),
    Check("check_apis", "every API gives the same text", args=("{url}",)),
    Check(
        "check_strangers",
        "other origins are refused, and forged text makes no turn",
        short=("--conversations", "20"),
    ),
    Check(
        "check_clients:sessions",
        "agents edit, make broken calls and outlive killed servers",
        ("{folder}", "--parts", "sessions"),
        ("--only", "Codex"),
        ("folder",),
    ),
    Check(
        "check_clients:compaction",
        "agents whose context becomes full",
        ("{folder}", "--parts", "compaction"),
        ("--only", "Codex"),
        ("folder",),
    ),
    Check(
        "check_clients:launch",
        "agents that `luceasync launch` starts, until their context is full",
        ("{folder}", "--parts", "launch"),
        ("--only", "pi"),
        ("folder",),
    ),
    Check(
        "check_clients:recipes",
        "the recipes of docs/agents.md, as they stand",
        ("{folder}", "--parts", "recipes"),
        ("--only", "langchain"),
        ("folder",),
    ),
    Check(
        "check_clients:cases",
        "client programs as people use them",
        ("{folder}", "--parts", "cases"),
        ("--only", "openai", "anthropic"),
        ("folder",),
    ),
    Check(
        "check_clients:forced",
        "client programs that force a format",
        ("{folder}", "--parts", "forced"),
        ("--only", "llm"),
        ("folder",),
    ),
    Check(
        "check_openapi",
        "schemathesis against the OpenAPI document",
        ("{folder}",),
        ("--cases", "3"),
        ("folder",),
    ),
    Check("check_terminal", "luceasync chat in a terminal, by tmux"),
    Check("check_page", "the page in a headless Chromium", ("{folder}",), needs=("folder",)),
    Check(
        "check_templates",
        "chat templates of a folder as transformers renders them",
        ("{folder}",),
        needs=("folder",),
    ),
    Check(
        "check_llama_cpp",
        "a GGUF file beside llama.cpp",
        ("{gguf}", "--peer", "{peer}"),
        needs=("gguf", "peer"),
    ),
    Check(
        "check_real_models",
        "real models call tools, fill in, outlive kills and splits; those that are fetched",
        short=("smollm2-135m",),
    ),
    Check(
        "check_store",
        "servers of different splits over one bucket",
        ("--moto", "{moto}"),
        ("--kills", "1"),
        ("moto",),
    ),
    Check(
        "check_link",
        "a store behind a slow link: what is read, and what is run; root",
        ("--moto", "{moto}"),
        ("--factors", "0.2,8"),
        ("moto",),
    ),
    Check(
        "check_take_up",
        "how soon one server takes up what another has written",
        ("--moto", "{moto}"),
        ("--prompts", "2"),
        ("moto",),
    ),
    Check(
        "check_budget",
        "twenty writers to one directory, whose keeper is killed",
        short=("--budget", "30", "--seconds", "30"),
    ),
    Check("chaos_ipc", "a channel's other end dies, hangs and lies", short=("--rounds", "12")),
    Check(
        "chaos_backends",
        "backends of a server die, hang and lie",
        short=("--rounds", "2", "--only", "kill:decode,half:save"),
    ),
    Check("chaos_delays", "how soon a backend's death is noticed", short=("--rounds", "2")),
    Check(
        "hostile_clients",
        "what hostile clients cost the others, one by one",
        short=("--only", "text of 2 MB"),
    ),
    Check(
        "hostile_load:connections",
        "connections opened and ended at a rate",
        ("connections",),
        ("--seconds", "3"),
    ),
    Check("hostile_load:crowd", "a crowd of clients", ("crowd",), ("--seconds", "3")),
    Check(
        "fuzz_requests",
        "requests with fields at their extremes, in process",
        short=("--requests", "200"),
    ),
    Check(
        "fuzz_requests:server",
        "the same through a server",
        ("--server",),
        ("--requests", "50"),
    ),
    Check(
        "fuzz_requests:routes",
        "requests to all other routes",
        ("--routes",),
        ("--requests", "100"),
    ),
    Check(
        "fuzz_answers",
        "answers of every format, broken at random, through every API",
        short=("--texts", "56", "--model", "6"),
    ),
    Check("soak", "mixed load for a quarter of an hour", short=("--minutes", "0.5")),
)


def main() -> None:
    """Run, and print a summary."""
    options = parse()
    chosen = [check for check in CHECKS if not options.only or is_asked(check, options.only)]
    if options.list:
        for check in chosen:
            needs = "".join(f"  (needs --{each})" for each in check.needs)
            print(f"{check.name:26}{check.what}{needs}")
        return
    results = [(check, *run(check, options)) for check in chosen]
    print(f"\n{'check':26}{'result':>10}{'seconds':>10}")
    for check, result, seconds in results:
        print(f"{check.name:26}{result:>10}{seconds:10.0f}")
    sys.exit(1 if any(result.startswith("failed") for _, result, _ in results) else 0)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the flags. Exits if --only names no check."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.acceptance",
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--list", action="store_true", help="name the checks and end")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="NAME,...")
    parser.add_argument("--short", action="store_true", help="a small selection of each check")
    parser.add_argument("--folder", help="of client programs, once, or of templates")
    parser.add_argument("--gguf", metavar="FILE", help="for check_llama_cpp")
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter with llama-cpp-python")
    parser.add_argument("--moto", metavar="PYTHON", help="an interpreter with moto[server]")
    options = parser.parse_args(arguments)
    for name in options.only:
        if not any(is_asked(check, [name]) for check in CHECKS):
            parser.error(f"--only {name}: no such check; --list names them")
    return options


def is_asked(check: Check, names: Sequence[str]) -> bool:
    """Whether `names` has the check's name or its program's, with or without "check_"."""
    program = check.name.partition(":")[0]
    return not {check.name, program, program.removeprefix("check_")}.isdisjoint(names)


def run(check: Check, options: argparse.Namespace) -> tuple[str, float]:
    """The verdict, and the seconds it took."""
    lacking = [each for each in check.needs if getattr(options, each) is None]
    if lacking:
        return "skipped", 0.0
    print(f"\n=== {check.name}: {check.what}", flush=True)
    started = time.monotonic()
    with server_for(check) as url:
        given = {"url": url, "moto": options.moto}
        given |= {"folder": options.folder, "gguf": options.gguf, "peer": options.peer}
        words = [word.format(**given) for word in check.args]
        words += check.short if options.short else ()
        command = [sys.executable, "-m", check.module, *words]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
    return "passed" if status == 0 else f"failed {status}", time.monotonic() - started


@contextmanager
def server_for(check: Check) -> Iterator[str]:
    """URL of a server of the bundled model for a check that needs one; else empty."""
    if "{url}" not in check.args:
        yield ""
        return
    with server([], ROOT) as client:
        yield client.url


if __name__ == "__main__":
    main()
