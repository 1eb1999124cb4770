"""What a client is told of a fault: its words, without where this machine keeps its files.

Knows no fault and no page.
"""

from __future__ import annotations

import re

# As Python quotes a name, which may hold spaces; else up to a space or the end of a phrase.
_QUOTED = re.compile(r"(?P<quote>['\"])/(?:(?!(?P=quote)).)*(?P=quote)")
_BARE = re.compile(r"(?<![\w./:'\"])/(?:[^\s/'\"]+/)*(?=[^\s/])")


def without_paths(words: str) -> str:
    """`words` with the last name of each absolute path in its place."""
    return _BARE.sub("", _QUOTED.sub(_last_name, words))


def _last_name(match: re.Match[str]) -> str:
    quote = match["quote"]
    return quote + match[0].strip(quote).rstrip("/").rpartition("/")[2] + quote
