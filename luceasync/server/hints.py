"""Which conversation a request belongs to, as clients tell it.

Owns the headers, and how long a name may be. A hint that makes no sense in a header is no fault of
the request: nobody asked for it. Knows no body but for the one field.
"""

from __future__ import annotations

from starlette.datastructures import Headers

from luceasync.errors import RequestError

# Of Codex, OpenCode and others, Claude Code; a session is less than what shares a key.
SESSION_HEADERS = ("session-id", "x-session-id", "x-claude-code-session-id")
MAX_HEADER_CHARS = 256
MAX_KEY_CHARS = 64  # as OpenAI has it


def conversation_of(headers: Headers, key: str | None = None) -> str:
    """The client's name for it; "" where it has none. `key`: the body's `prompt_cache_key`. Raises
    RequestError for one that is too long, as OpenAI does.
    """
    if key is not None and len(key) > MAX_KEY_CHARS:
        raise RequestError(
            f"Invalid 'prompt_cache_key': string too long. Expected a string with maximum length "
            f"{MAX_KEY_CHARS}, but got a string with length {len(key)} instead.",
            param="prompt_cache_key",
            code="string_above_max_length",
        )
    told = (headers.get(name, "").strip() for name in SESSION_HEADERS)
    return next((word for word in told if 0 < len(word) <= MAX_HEADER_CHARS), key or "")
