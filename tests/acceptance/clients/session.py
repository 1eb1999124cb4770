"""Sessions of agents: what is asked, and what the model says turn by turn, with calls that break.

A text leads to the next one by its mark (tests/crafted.py), whatever the agent answers to a call.
Owns what an agent must have done in the end. Knows no API and no server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.acceptance.clients.script import WriteCall

GREET = 'def greet(name):\n    return "hello " + name\n'
GREETED = 'def greet(name):\n    return f"Hello, {name}!"\n'
DOCUMENTED = 'def greet(name):\n    """Say hello."""\n    return f"Hello, {name}!"\n'
CHARS_CUT = 9  # of the last argument, at its end
# Gives the check time to end the server and start another one while the agent runs a command.
HOLD = "touch waiting; for i in $(seq 600); do test -e go && break; sleep 0.1; done; rm go; echo on"

COUNT = "seq -s ' ' 4000"
# Of each agent's shell: its name, the name of a command, and other arguments.
SHELLS: dict[str, tuple[str, str, dict[str, str]]] = {
    "Claude Code": ("Bash", "command", {"description": "work"}),
    "Codex": ("exec_command", "cmd", {}),
    "OpenCode": ("bash", "command", {"description": "work"}),
}

How = Literal["whole", "cut", "in a thought"]


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the model: what it thinks, its words, and a call. A call that is `cut` or
    stands in a thought must not be carried out, and ends the agent's turn.
    """

    words: str
    tool: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    how: How = "whole"

    def text(self, following: str, write_call: WriteCall, *, opens: bool) -> str:
        """What the model writes, with the mark of the `following` text; `opens`: it opens its
        thought itself.
        """
        call = "" if self.tool is None else write_call(self.tool, self.arguments)
        thought, words = f"Now: {self.words}", f"{self.words} {following}"
        if self.how == "in a thought":
            thought, call = f"{thought} I might write this:\n{call}", ""
        if self.how == "cut":
            last = str([*self.arguments.values()][-1])
            call = call[: call.rindex(last[-CHARS_CUT:])]
        said = f"{thought}\n</think>\n\n{words}" + (f"\n\n{call}" if call else "")
        return f"<think>\n{said}" if opens else said


@dataclass(frozen=True, slots=True)
class Session:
    """`runs`: of the agent, each with what it is asked and what the model says; `files`: what the
    agent's folder has before and after.
    """

    letter: str
    runs: Sequence[tuple[str, Sequence[Turn]]]
    before: Mapping[str, str]
    after: Mapping[str, str]

    def texts(self, write_call: WriteCall, *, opens: bool) -> dict[str, str]:
        """What the model says, by name."""
        turns = [turn for _, turns in self.runs for turn in turns]
        return {
            self._name(i): turn.text(f"~{self._name(i + 1)}", write_call, opens=opens)
            for i, turn in enumerate(turns)
        } | {self._name(len(turns)): "Nothing is left to do."}

    def asked(self) -> list[str]:
        """What the agent is asked in each run, with the mark of the first text."""
        firsts = [sum(len(turns) for _, turns in self.runs[:i]) for i in range(len(self.runs))]
        return [
            f"{question} ~{self._name(first)}"
            for (question, _), first in zip(self.runs, firsts, strict=True)
        ]

    def _name(self, place: int) -> str:
        return f"{self.letter}{place:02}"

    def begin(self, work: Path) -> None:
        """Write the files of `before`."""
        work.mkdir(parents=True, exist_ok=True)
        for name, text in self.before.items():
            (work / name).write_text(text)

    def faults(self, work: Path) -> list[str]:
        """How the files differ from `after`; a file that is not named there must not exist if a
        call of the session was to write it.
        """
        names = {"greet.py", "notes.txt", "never.txt"}
        found = {name: (work / name).read_text() for name in names if (work / name).exists()}
        return [
            f"{name}: {found.get(name)!r}, not {self.after.get(name)!r}"
            for name in sorted(names)
            if found.get(name) != self.after.get(name)
        ]


def claude_code(work: Path) -> Session:
    """Reads and edits with tools that want absolute paths."""
    file = str(work / "greet.py")
    old, new = (text.splitlines()[1] for text in (GREET, GREETED))
    edit = {"file_path": file, "old_string": old, "new_string": new}
    return _session(
        "c",
        reads=Turn("I read the file.", "Read", {"file_path": file}),
        errs=Turn("I edit all of it.", "Edit", {**edit, "replace_all": "perhaps"}),
        edits=Turn("I edit it rightly.", "Edit", edit),
        holds=Turn("I wait a while.", "Bash", {"command": HOLD, "description": "wait"}),
        again=(
            Turn("I look at it again.", "Read", {"file_path": file}),
            Turn(
                "I document it.",
                "Edit",
                {
                    "file_path": file,
                    "old_string": "def greet(name):\n",
                    "new_string": 'def greet(name):\n    """Say hello."""\n',
                },
            ),
        ),
        shell=SHELLS["Claude Code"],
    )


def codex(work: Path) -> Session:
    """Reads by its shell, edits by patches, and has a tool of an MCP server."""
    old, new = (text.splitlines()[1] for text in (GREET, GREETED))
    patch = f"*** Begin Patch\n*** Update File: greet.py\n@@\n-{old}\n+{new}\n*** End Patch"
    document = (
        "*** Begin Patch\n*** Update File: greet.py\n@@ def greet(name):\n"
        '+    """Say hello."""\n'
        f" {new}\n*** End Patch"
    )
    session = _session(
        "d",
        reads=Turn("I read the file.", "exec_command", {"cmd": "cat greet.py"}),
        errs=Turn("I read it oddly.", "exec_command", {"cmd": "cat greet.py", "login": "perhaps"}),
        edits=Turn("I patch it.", "apply_patch", {"input": patch}),
        holds=Turn("I wait a while.", "exec_command", {"cmd": HOLD, "yield_time_ms": 30000}),
        again=(
            Turn("I take a note.", "mcp__notes__add_note", {"line": "greet says hello"}),
            Turn("I document it.", "apply_patch", {"input": document}),
        ),
        shell=SHELLS["Codex"],
    )
    after = {**session.after, "notes.txt": "greet says hello\n"}
    return Session(session.letter, session.runs, session.before, after)


def opencode(work: Path) -> Session:
    """Reads and edits with tools whose arguments are in camel case."""
    file = str(work / "greet.py")
    old, new = (text.splitlines()[1] for text in (GREET, GREETED))
    edit = {"filePath": file, "oldString": old, "newString": new}
    return _session(
        "o",
        reads=Turn("I read the file.", "read", {"filePath": file}),
        errs=Turn("I edit all of it.", "edit", {**edit, "replaceAll": "perhaps"}),
        edits=Turn("I edit it rightly.", "edit", edit),
        holds=Turn("I wait a while.", "bash", {"command": HOLD, "description": "wait"}),
        again=(
            Turn("I look at it again.", "read", {"filePath": file}),
            Turn(
                "I document it.",
                "edit",
                {
                    "filePath": file,
                    "oldString": "def greet(name):\n",
                    "newString": 'def greet(name):\n    """Say hello."""\n',
                },
            ),
        ),
        shell=SHELLS["OpenCode"],
    )


def _session(
    letter: str,
    *,
    reads: Turn,
    errs: Turn,
    edits: Turn,
    holds: Turn,
    again: Sequence[Turn],
    shell: tuple[str, str, Mapping[str, Any]],
) -> Session:
    """Three runs: an edit after calls of no tool and of a wrong type, with a wait in the middle and
    a call in a thought at its end; another edit and a cut call; a last answer.
    """
    tool, argument, more = shell
    thought = {**more, argument: "echo thought > never.txt"}
    cut = {**more, argument: "echo cut > never.txt; echo and more"}
    runs = (
        (
            "Greet more politely.",
            (
                reads,
                Turn("I try another tool.", "ReadLines", {"path": "greet.py", "lines": 3}),
                errs,
                edits,
                holds,
                Turn("The first part is done.", tool, thought, how="in a thought"),
            ),
        ),
        (
            "Document it.",
            (*again, Turn("The second part is done.", tool, cut, how="cut")),
        ),
        ("Is it all done?", (Turn("All parts are done."),)),
    )
    return Session(letter, runs, {"greet.py": GREET}, {"greet.py": DOCUMENTED})


def long_session(agent: str) -> Session:
    """A command whose output fills a small context, so that the agent has the model sum up what was
    said before it goes on. Codex asks for that after the second call's result, others before it.
    """
    tool, argument, more = SHELLS[agent]
    summary = [Turn("I counted. I have yet to write the greeting.")] if agent == "Codex" else []
    turns = (
        Turn("I count.", tool, {**more, argument: COUNT}),
        Turn("I look around.", tool, {**more, argument: "echo here"}),
        *summary,
        Turn("I write it.", tool, {**more, argument: "echo hello > greet.py"}),
        Turn("The greeting is written."),
    )
    return Session("z", [("Count, then write a greeting.", turns)], {}, {"greet.py": "hello\n"})


SESSIONS = {"Claude Code": claude_code, "Codex": codex, "OpenCode": opencode}
