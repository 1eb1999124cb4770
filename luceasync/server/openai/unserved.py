"""Fields of other servers that would change what an answer says or may be.

Owns the list, and the refusal: an answer without the constraint that was asked for is worse than
none. Fields that only tune how fast it comes are ignored, as all others that nobody knows.
"""

from __future__ import annotations

import msgspec

from luceasync.errors import RequestError

# What a client sends that names a field without using it.
OFF = frozenset(
    {b"", b"null", b"false", b"0", b'""', b"[]", b"{}", b'"none"', b'"auto"', b'["text"]'}
)


class UnservedBody(msgspec.Struct):
    """The fields as they were sent, not parsed: empty for one that is absent."""

    # Tools as they were given before there was `tools`.
    functions: msgspec.Raw = msgspec.Raw()
    function_call: msgspec.Raw = msgspec.Raw()
    # Which tokens an answer has, and where it ends.
    bad_words: msgspec.Raw = msgspec.Raw()
    allowed_token_ids: msgspec.Raw = msgspec.Raw()
    stop_token_ids: msgspec.Raw = msgspec.Raw()
    use_beam_search: msgspec.Raw = msgspec.Raw()
    # What the prompt is, and what else is told of it.
    chat_template: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()
    continue_final_message: msgspec.Raw = msgspec.Raw()
    prompt_logprobs: msgspec.Raw = msgspec.Raw()
    audio: msgspec.Raw = msgspec.Raw()
    modalities: msgspec.Raw = msgspec.Raw()
    web_search_options: msgspec.Raw = msgspec.Raw()


def refuse_unserved(body: UnservedBody) -> None:
    """Raise RequestError, which names the field, for one that is used. Its value is not told
    again: it may be long.
    """
    for name in UnservedBody.__struct_fields__:
        if bytes(getattr(body, name)) not in OFF:
            raise RequestError(f"'{name}' is not served here: leave it out.", param=name)
