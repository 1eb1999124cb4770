"""The forms in which a request names what it wants (RFC 9112, 3.2). Knows no route."""

from __future__ import annotations

import h11

SCHEMES = (b"http", b"https")


def in_origin_form(request: h11.Request) -> h11.Request:
    """The request as a client would say it that knows of no proxies: of a whole URI, which a server
    must accept (3.2.2), the path is wanted, and its authority is the Host, whatever else is said.
    """
    scheme, separator, rest = request.target.partition(b"://")
    if not separator or scheme.lower() not in SCHEMES:
        return request
    end = min((at for at in map(rest.find, (b"/", b"?")) if at >= 0), default=len(rest))
    authority, wanted = rest[:end], rest[end:]
    if not authority:
        return request
    others = [(name, value) for name, value in request.headers if name != b"host"]
    return h11.Request(
        method=request.method,
        headers=[(b"host", authority), *others],
        target=wanted if wanted.startswith(b"/") else b"/" + wanted,
        http_version=request.http_version,
    )
