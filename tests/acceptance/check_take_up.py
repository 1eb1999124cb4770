"""How soon a server takes up what another one has written, through a directory and a store. CPU.

    python -m tests.acceptance.check_take_up [--moto PYTHON] [--prompts 8]

PYTHON has the package `moto[server]`, an S3 server for tests; without it the store is left out. The
other server is asked as soon as the files, or the objects, are there. Exit status 1 if it runs a
prompt that it could have taken up within a second.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import obstore
from obstore.store import S3Store

from luceasync.bench.servers import Client, server
from tests.acceptance import command
from tests.acceptance.check_link import first_of, num_unwritten, written
from tests.acceptance.check_store import BUCKET, moto

DEADLINE_S = 120.0
WITHIN_S = 1.0
FLAGS = ["--dtype", "fp32", "--parallel", "1", "--draft", "none"]


def num_files(folder: Path) -> int:
    """Whole files of nodes."""
    return sum(path.suffix in (".safetensors", ".end") for path in folder.glob("*/*"))


def settled_s(client: Client, count: Callable[[], int], before: int) -> float:
    """When the last of the new ones came, once no more have come for half a second and the server
    has none to write.
    """
    last, since_s = before, time.monotonic()
    deadline_s = since_s + DEADLINE_S
    while last == before or time.monotonic() - since_s < WITHIN_S / 2 or num_unwritten(client):
        assert time.monotonic() < deadline_s, "nothing was written"
        if (now := count()) != last:
            last, since_s = now, time.monotonic()
        time.sleep(0.01)
    return since_s


def taken_up(
    a: Client, b: Client, count: Callable[[], int], num_prompts: int, num_uses: int
) -> tuple[list[float], list[float], int]:
    """Of each prompt, how long after the write the other server was asked, and how long it took to
    its first token; and how many it took up. `num_uses`: before it is written where `count` looks.
    """
    first_of(b, 50)  # what is compiled on first use
    waits, seconds, num_read = [], [], 0
    for number in range(num_prompts):
        before = count()
        for _ in range(num_uses):
            first_of(a, number)
            written(a)
        written_s = settled_s(a, count, before)
        waits.append(time.monotonic() - written_s)
        found = first_of(b, number)
        seconds.append(found.seconds)
        num_read += found.is_read
    return waits, seconds, num_read


def main() -> int:
    """Run both; the exit status."""
    parser = command.parser(__doc__)
    parser.add_argument("--moto", metavar="PYTHON")
    parser.add_argument("--prompts", type=int, default=8, help="default: 8")
    options = parser.parse_args()
    report, is_right = command.open_report(options), True
    columns = ("through", "asked after the write", "taken up", "first token", "prefill")
    table = report.table(columns)

    def add(what: str, a: Client, b: Client, count: Callable[[], int], num_uses: int) -> bool:
        prefill_s = [first_of(a, 100 + n).seconds for n in range(3)][-1]
        waits, seconds, num_read = taken_up(a, b, count, options.prompts, num_uses)
        times = [f"{max(waits):.2f} s", f"{statistics.median(seconds):.2f} s", f"{prefill_s:.2f} s"]
        table.add(what, times[0], f"{num_read} of {len(seconds)}", *times[1:])
        return num_read == len(seconds) and max(waits) <= WITHIN_S

    def start(stack: ExitStack, flags: Sequence[object], **how: object) -> Client:
        return stack.enter_context(server([*FLAGS, *map(str, flags)], **how))

    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        root = Path(name)
        flags = ["--kv-cache-shared", "--kv-cache-dir", root / "shared"]
        a, b = (start(stack, flags) for _ in range(2))
        is_right &= add("a directory", a, b, lambda: num_files(root / "shared"), 1)
    if options.moto is None:
        return 0 if is_right else 1
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        root, (port, _) = Path(name), stack.enter_context(moto(options.moto))
        endpoint = f"http://127.0.0.1:{port}"
        keys = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
        bucket = S3Store(BUCKET, endpoint=endpoint, **keys, client_options={"allow_http": True})
        env = {f"AWS_{key.upper()}": value for key, value in keys.items()}
        env |= {"AWS_ENDPOINT_URL": endpoint, "AWS_ALLOW_HTTP": "true"}
        flags = ["--kv-store", f"s3://{BUCKET}/shared", "--kv-cache-dir"]
        a, b = (start(stack, [*flags, root / name], env=env) for name in "ab")
        is_right &= add("a store", a, b, lambda: sum(map(len, obstore.list(bucket))), 2)
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
