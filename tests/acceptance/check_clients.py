"""Client programs as people use them, with scripted answers; forced formats ask the bundled model.

    python -m tests.acceptance.check_clients FOLDER [--only NAME ...] [--parts sessions,cases]

Installs each under FOLDER, once. No request may be refused unless its case expects so, and a later
prompt must be cached as far as the one before went. Exit status 1 if a case failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from luceasync.config import BUNDLED_MODEL_DIR
from tests import crafted
from tests.acceptance import command
from tests.acceptance.clients.agents import AGENTS
from tests.acceptance.clients.launched import BIN, GREETING, LAUNCHED
from tests.acceptance.clients.programs import PROGRAMS, Program
from tests.acceptance.clients.recipes import TRIES, Place, try_recipe
from tests.acceptance.clients.record import Exchange, exchanges
from tests.acceptance.clients.script import WRITERS
from tests.acceptance.clients.seen import of_agent, refusals, tier, uncached, usage
from tests.acceptance.clients.serve import MAX_CTX_TOKENS
from tests.acceptance.clients.servers import RecordedServer
from tests.acceptance.clients.session import SESSIONS, SHELLS, Session, long_session

PARTS = ["sessions", "compaction", "launch", "recipes", "cases", "forced"]
EXPECTS_REFUSALS = ("errors",)
TEMPLATES = Path(__file__).parent / "turns"
OPENS = {"qwen3": True, "qwen3.5": False}  # whether the model opens its thoughts itself
# Contexts that the output of a command fills.
SMALL = {
    "Claude Code": {"65536": "38000"},
    "Codex": {"52000": "12000"},
    "OpenCode": {"65536": "20000"},
}
TURNS = (
    ("Do this: [[{tool} {arguments}]] [[say the tool said it]]", "the tool said it"),
    ("Then: [[{tool} {arguments}]] [[say the second is done]]", "the second is done"),
)


@contextmanager
def server(folder: Path, *model: str) -> Iterator[str]:
    """URL of a server that is ready, with its files in `folder`; `model`: its flags."""
    with RecordedServer(folder, *model) as running:
        yield running.url


def check_turns(program: Program, under: Path, runs: Path, url: str) -> list[str]:
    """Errors of an agent in two turns with a call in each."""
    agent, log = AGENTS[program.name], runs / "requests.jsonl"
    home, faults, seen = runs / "homes" / program.folder_name, [], []
    tool, argument, more = SHELLS[program.name]
    arguments = json.dumps({**more, argument: "echo luce-$((40+2))"})
    for i, (asked, end) in enumerate(TURNS):
        begin = len(exchanges(log))
        question = asked.format(tool=tool, arguments=arguments)
        ran = agent.run(under / program.folder_name, home, url, question, goes_on=i > 0)
        if ran.status or end not in ran.output:
            faults.append(f"{ran.status}: {(ran.output + ran.errors)[-400:]}")
        seen.append(exchanges(log)[begin:])
        faults += refusals(seen[-1])
        if len(of_agent(seen[-1])) != 2:
            faults.append(f"turn {i}: {len(of_agent(seen[-1]))} requests with tools, not 2")
    return faults + uncached([of_agent(each) for each in seen])


def check_session(
    program: Program, under: Path, runs: Path, template: str
) -> tuple[list[str], list[list[Exchange]]]:
    """Errors of an agent in its session, and its requests by run. The server is killed before each
    run but the first, and while the agent waits for a command.
    """
    agent, home = AGENTS[program.name], runs / "home"
    work = home / "work"
    session = SESSIONS[program.name](work)
    session.begin(work)
    faults: list[str] = []
    seen: list[list[Exchange]] = []
    with scripted(runs, session, template) as running:

        def kill_while_it_waits() -> None:
            if (work / "waiting").exists():
                (work / "waiting").unlink()
                running.kill()
                (work / "go").touch()

        for i, (asked, (_, turns)) in enumerate(zip(session.asked(), session.runs, strict=True)):
            if i:
                running.kill()
            begin = len(exchanges(running.log))
            folder = under / program.folder_name
            ran = agent.run(
                folder, home, running.url, asked, goes_on=i > 0, meanwhile=kill_while_it_waits
            )
            if ran.status or turns[-1].words not in ran.output:
                faults.append(f"run {i}: {ran.status}: {(ran.output + ran.errors)[-400:]}")
            found = exchanges(running.log)[begin:]
            faults += refusals(found)
            seen.append(of_agent(found))
            if len(seen[-1]) != len(turns):
                faults.append(f"run {i}: {len(seen[-1])} requests with tools, not {len(turns)}")
            if i and seen[-1] and tier(seen[-1][0]) != "disk":
                faults.append(f"run {i}: restored from {tier(seen[-1][0])}, not from disk")
    return faults + uncached(seen) + session.faults(work), seen


def check_compaction(
    program: Program, under: Path, runs: Path, template: str
) -> tuple[list[str], list[list[Exchange]]]:
    """Errors of an agent whose context becomes full, and its requests."""
    agent = replace(AGENTS[program.name], changes=SMALL[program.name])
    home, session = runs / "home", long_session(program.name)
    [asked], [(_, turns)] = session.asked(), session.runs
    session.begin(home / "work")
    with scripted(runs, session, template) as running:
        ran = agent.run(under / program.folder_name, home, running.url, asked, goes_on=False)
        found = exchanges(running.log)
    faults = refusals(found) + session.faults(home / "work")
    if ran.status or turns[-1].words not in ran.output:
        faults.append(f"{ran.status}: {(ran.output + ran.errors)[-400:]}")
    sizes = [counts[0] for one in of_agent(found) if (counts := usage(one))]
    if sizes == sorted(sizes):
        faults.append(f"nothing was compacted: {sizes}")
    return faults, [of_agent(found)]


def check_launch(
    program: Program, under: Path, runs: Path, template: str
) -> tuple[list[str], list[list[Exchange]]]:
    """Errors of an agent that `luceasync launch` sets up for a server with a small context, in
    three turns, and its requests by turn.
    """
    agent, home = LAUNCHED[program.name], runs / "home"
    programs = under / program.folder_name / BIN[program.kind]
    faults: list[str] = []
    seen: list[list[Exchange]] = []
    flags = ("--template", template, "--max-ctx", str(agent.max_ctx_tokens))
    with RecordedServer(runs, *flags) as running:
        for i, question in enumerate(agent.questions()):
            begin = len(exchanges(running.log))
            told = agent.ask(home, programs, running.url, question, i > 0)
            found = exchanges(running.log)[begin:]
            faults += [f"turn {i}: {fault}" for fault in (*told, *refusals(found))]
            seen.append([one for one in found if agent.has_asked(one.body)])
    greeting = home / "work/greet.py"
    if not greeting.exists() or greeting.read_text() != GREETING:
        faults.append("the last turn did not write its file")
    sizes = [len(one.body) for run in seen for one in run]
    if sizes == sorted(sizes):
        faults.append(f"nothing was compacted: {sizes} bytes")
    return faults, seen


@contextmanager
def scripted(runs: Path, session: Session, template: str) -> Iterator[RecordedServer]:
    """A server whose model says what the session has it say."""
    texts = session.texts(WRITERS[template], opens=OPENS[template])
    source = (TEMPLATES / f"{template}.jinja").read_text()
    model = crafted.save(runs / "model", texts, source, MAX_CTX_TOKENS, BUNDLED_MODEL_DIR)
    with RecordedServer(runs, "--model", str(model)) as running:
        yield running


def check(
    program: Program, cases: str | None, under: Path, runs: Path, url: str
) -> dict[str, list[str]]:
    """The error of each case, None for none; `cases` None: of an agent."""
    if cases is None:
        return {"two turns, a call in each": check_turns(program, under, runs, url)}
    log = runs / "requests.jsonl"
    before = len(exchanges(log))
    home = runs / "homes" / program.folder_name
    told = program.run(cases, under, home, url, runs / "model")
    rows = {case: [error] if error else [] for case, error in told.items()}
    refused = refusals(exchanges(log)[before:])
    if refused and not any(case in rows for case in EXPECTS_REFUSALS):
        rows["refusals"] = refused
    return rows


def tell(program: Program, under: Path, rows: dict[str, list[str]], how: str = "") -> int:
    """Print a line for each case; returns the number of failures."""
    name = f"{program.name} ({program.version(under)})"
    for case, faults in rows.items():
        print(f"| {name} | {case}{how} | {'; '.join(faults) or 'passed'} |", flush=True)
    return sum(map(bool, rows.values()))


def run_sessions(part: str, chosen: list[Program], under: Path, runs: Path, template: str) -> int:
    """Hold a session of `part` with each agent; returns the number of failures."""
    case, hold = HELD[part]
    num_faulty = 0
    for program in chosen:
        if program.name in (LAUNCHED if part == "launch" else SESSIONS):
            program.install(under)
            place = runs / part / program.folder_name
            place.mkdir(parents=True)
            faults, seen = hold(program, under, place, template)
            cached = "; ".join(" ".join(_cached(one) for one in run) for run in seen)
            num_faulty += tell(program, under, {f"{case} ({cached})": faults})
    return num_faulty


def run_recipes(chosen: list[Program], under: Path, runs: Path, template: str) -> int:
    """Follow the recipes of docs/agents.md; returns the number of failures."""
    num_faulty = 0
    with RecordedServer(runs, "--template", template) as running:
        for program in chosen:
            if program.name in TRIES:
                place = Place(program.install(under), runs / "homes" / program.folder_name)
                begin = len(exchanges(running.log))
                faults = try_recipe(program.name, running.url, place)
                faults += refusals(exchanges(running.log)[begin:])
                num_faulty += tell(program, under, {"the recipe as it stands": faults})
    return num_faulty


HELD = {
    "sessions": ("a session, killed three times", check_session),
    "compaction": ("a session that fills the context", check_compaction),
    "launch": ("by `luceasync launch`, with a full context", check_launch),
}


def _cached(one: Exchange) -> str:
    counts = usage(one)
    return "?" if counts is None else f"{counts[1]}/{counts[0]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where clients are installed and run")
    parser.add_argument("--only", nargs="*", default=[], help="names of clients")
    parser.add_argument("--parts", type=command.names, default=PARTS, help=",".join(PARTS))
    parser.add_argument("--template", choices=WRITERS, default="qwen3.5")
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts {','.join(unknown)}: parts are {', '.join(PARTS)}")
    under = args.folder.resolve()
    under.mkdir(parents=True, exist_ok=True)
    runs = Path(tempfile.mkdtemp(prefix="run-", dir=under))
    chosen = [one for one in PROGRAMS if not args.only or one.name in args.only]
    print("| client | case | |\n|---|---|---|")
    num_faulty = 0
    for part in [part for part in HELD if part in args.parts]:
        num_faulty += run_sessions(part, chosen, under, runs, args.template)
    if "recipes" in args.parts:
        num_faulty += run_recipes(chosen, under, runs / "recipes", args.template)
    if "cases" in args.parts:
        with server(runs / "scripted", "--template", args.template) as url:
            for program in chosen:
                if program.cases is None and program.name not in AGENTS:
                    continue
                program.install(under)
                rows = check(program, program.cases, under, runs / "scripted", url)
                num_faulty += tell(program, under, rows)
    forced = [program for program in chosen if program.forced]
    if "forced" in args.parts and forced:
        with server(runs / "bundled", "--bundled") as url:
            for program in forced:
                program.install(under)
                rows = check(program, program.forced, under, runs / "bundled", url)
                num_faulty += tell(program, under, rows, ", forced")
    sys.exit(1 if num_faulty else 0)


if __name__ == "__main__":
    main()
