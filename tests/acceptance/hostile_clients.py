"""Hostile clients, one after the other, at a server of its own: what each costs the others.

For each: the slowest /health meanwhile, what the client got, the server's memory and descriptors.
"""

from __future__ import annotations

import argparse
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.acceptance.hostile.server import CHAT, MIB, ROOT, SAID, Server, watched

NUM_HEALTH_BYTES = 138  # of an answer of /health


def posted(body: bytes) -> Callable[[Server], str]:
    """A client that posts `body` and returns its status and the size of the answer."""

    def act(server: Server) -> str:
        status, said = server.post(body)
        return f"{status}, {len(said)} bytes"

    return act


def sampled(server: Server) -> str:
    """Three requests that once ended the engine for good."""
    fields = '"repetition_penalty":1e-40,"min_p":0.05,"max_tokens":4'
    body = f"{{{SAID},{fields}}}".encode()
    return ", ".join(str(server.post(body)[0]) for _ in range(3))


def held_bodies(server: Server) -> str:
    """60 bodies of 15 MiB, whose last byte comes late."""
    body = b'{"x":"' + b"x" * (15 * MIB - 8) + b'"}'
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    )
    results: Counter[str] = Counter()

    def send() -> None:
        try:
            with server.connect() as client:
                client.sendall(head)
                client.sendall(body[:-1])
                time.sleep(4.0)
                client.sendall(body[-1:])
                results[client.recv(64)[9:12].decode()] += 1
        except OSError as error:
            results[type(error).__name__] += 1

    threads = [threading.Thread(target=send) for _ in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ", ".join(f"{num} x {what}" for what, num in results.items())


def crumbs(server: Server) -> str:
    """A body in chunks of one byte, as many as arrive in 20 seconds."""
    crumb = b"1\r\n \r\n" * 10_000
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    num_sent, begin = 0, time.perf_counter()
    with server.connect() as client:
        client.sendall(head.encode())
        while time.perf_counter() - begin < 20.0:
            client.sendall(crumb)
            num_sent += 10_000
        return f"{num_sent} chunks"


def opened_and_closed(server: Server) -> str:
    """1,000 connections a second for ten seconds, each with one request."""
    results: Counter[str] = Counter()
    ask = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    begin = time.perf_counter()
    for number in range(10_000):
        time.sleep(max(0.0, begin + number / 1000 - time.perf_counter()))
        try:
            with socket.create_connection(("127.0.0.1", server.port), timeout=1) as client:
                client.sendall(ask)
                said = client.makefile("rb").read(NUM_HEALTH_BYTES)
                results["served" if said else "refused"] += 1
        except OSError as error:
            results[type(error).__name__] += 1
        if results.total() - results["served"] > 20:
            break
    rate = results.total() / (time.perf_counter() - begin)
    return f"{dict(results)}, {rate:.0f}/s, {server.num_descriptors} descriptors"


def reset_streams(server: Server) -> str:
    """20,700 streams of HTTP/2 without TLS, each reset at once."""
    block = b"\x82\x86\x84\x41\x01x"
    frames = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)]
    for stream in range(1, 41_400, 2):
        name = stream.to_bytes(4, "big")
        frames.append(len(block).to_bytes(3, "big") + b"\x01\x05" + name + block)
        frames.append(b"\x00\x00\x04\x03\x00" + name + b"\x00\x00\x00\x08")
    said = b""
    with server.connect() as client:
        try:
            client.sendall(b"".join(frames))
            said = client.recv(64)
        except OSError:
            said = said or b"(closed)"
    return repr(said[:12])


def left_early(server: Server) -> str:
    """A client that sends one byte ahead and leaves; how long its answer goes on."""
    body = f'{{{SAID},"ignore_eos":true,"n":16}}'.encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    )
    client = server.connect()
    client.sendall(head + body)
    while b"luceasync_running_lanes 0" in server.get("/metrics"):
        time.sleep(0.02)
    client.sendall(b"G")
    time.sleep(0.1)
    client.close()
    begin = time.perf_counter()
    while b"luceasync_running_lanes 0" not in server.get("/metrics"):
        if time.perf_counter() - begin > 30:
            return "not noticed in 30 s"
        time.sleep(0.02)
    return f"noticed after {time.perf_counter() - begin:.2f} s"


def after(server: Server) -> str:
    """The status of a request now."""
    try:
        return str(server.post(f'{{{SAID},"max_tokens":1}}'.encode())[0])
    except OSError as error:
        return type(error).__name__


def cases() -> dict[str, Callable[[Server], str]]:
    def text(num_bytes: int) -> bytes:
        words = ("to be or not to be, that is the question. " * (num_bytes // 42))[:num_bytes]
        return f'{{"messages":[{{"role":"user","content":"{words}"}}]}}'.encode()

    tools = "{" + SAID + ',"tools":[' + ",".join(["{}"] * 5_000_000) + "]}"
    biases = ",".join(f'"{i}":1' for i in range(1_000_000))
    return {
        "text of 2 MB": posted(text(2 * MIB)),
        "text of 15 MB": posted(text(15 * MIB)),
        "5,000,000 tools": posted(tools.encode()),
        "1,000,000 biases": posted(f'{{{SAID},"logit_bias":{{{biases}}}}}'.encode()),
        "a stop of 1 MB, n 16": posted(
            f'{{{SAID},"n":16,"max_tokens":1,"stop":"{"x" * MIB}"}}'.encode()
        ),
        "a model's name of 15 MB": posted(f'{{{SAID},"model":"{"x" * 15 * MIB}"}}'.encode()),
        "60 bodies of 15 MB": held_bodies,
        "chunks of one byte": crumbs,
        "a byte ahead": left_early,
        "reset streams": reset_streams,
        "10,000 connections": opened_and_closed,
        "repetition_penalty 1e-40": sampled,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkout", type=Path, default=ROOT)
    parser.add_argument("--only", default="", help="of the cases those with this in their name")
    arguments = parser.parse_args()
    checkout = arguments.checkout.resolve()
    print(f"{'client':26}{'slowest /health':>16}{'memory before, most, after':>32}  got")
    for name, act in cases().items():
        if arguments.only not in name:
            continue
        server = Server(checkout)
        try:
            server.post(f'{{{SAID},"max_tokens":1}}'.encode())
            before = server.memory_mib
            with watched(server) as seen:
                got = act(server)
                time.sleep(2.0)
            memory = f"{before:.0f} {seen[1]:.0f} {server.memory_mib:.0f} MiB"
            status = after(server)
            print(f"{name:26}{seen[0]:14.2f} s{memory:>32}  {got}; then {status}", flush=True)
        finally:
            server.process.kill()


if __name__ == "__main__":
    main()
