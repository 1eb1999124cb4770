"""An MCP server over standard input and output with one tool, which appends a line to a file.

    python notes.py FILE

Uses the standard library alone: agents start it in their own environment.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TOOL = {
    "name": "add_note",
    "description": "Append a line to the notes.",
    "inputSchema": {
        "type": "object",
        "properties": {"line": {"type": "string"}},
        "required": ["line"],
    },
}


def answer(request: dict[str, Any], file: Path) -> dict[str, Any]:
    """The result of a request; empty for what has none."""
    params = request.get("params") or {}
    match request["method"]:
        case "initialize":
            return {
                "protocolVersion": params["protocolVersion"],
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "notes", "version": "1"},
            }
        case "tools/list":
            return {"tools": [TOOL]}
        case "tools/call":
            with file.open("a") as notes:
                notes.write(params["arguments"]["line"] + "\n")
            return {"content": [{"type": "text", "text": "noted"}]}
    return {}


def main() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        if "id" in request:
            told = {
                "jsonrpc": "2.0",
                "id": request["id"],
                "result": answer(request, Path(sys.argv[1])),
            }
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
