"""Fields of other servers that would change the answer and are not supported here.

They are refused if they are used: an answer without the requested constraint is worse than none.
Fields that only affect speed are ignored, like all unknown fields.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from luceasync.errors import RequestError
from luceasync.server.fields import GenerationBody

NOT_SERVED = "Not served: a 400 unless its value switches it off."
Unserved = Annotated[msgspec.Raw, msgspec.Meta(description=NOT_SERVED)]

ABSENT = (b"", b"null")
# Values that leave a field unused.
UNUSED = frozenset(
    {*ABSENT, b"false", b"0", b"0.0", b'""', b"[]", b"{}", b'"none"', b'"auto"', b'["text"]'}
)
ONE = frozenset({b"1", b"1.0"})
# Further unused values, by field.
NEUTRAL: dict[str, frozenset[bytes]] = {
    "typical_p": ONE,
    "typ_p": ONE,
    "tfs_z": ONE,
    "tfs": ONE,
    "guidance_scale": ONE,
    "cfg_scale": ONE,
    "num_beams": ONE,
    "length_penalty": ONE,
    "encoder_repetition_penalty": ONE,
    "truncate_prompt_tokens": frozenset({b"-1"}),
    "repetition_penalty": ONE,
    "repeat_penalty": ONE,
    "n": ONE,
    "tool_choice": frozenset({b'"auto"'}),
}


class UnservedBody(GenerationBody, kw_only=True):
    """Fields that no API here supports, kept undecoded."""

    # The predecessors of `tools`.
    functions: Unserved = msgspec.Raw()
    function_call: Unserved = msgspec.Raw()
    # Which tokens an answer may contain, and where it ends.
    bad_words: Unserved = msgspec.Raw()
    banned_strings: Unserved = msgspec.Raw()
    banned_tokens: Unserved = msgspec.Raw()
    custom_token_bans: Unserved = msgspec.Raw()
    allowed_token_ids: Unserved = msgspec.Raw()
    stop_regex: Unserved = msgspec.Raw()
    # Sampling: only the fields that switch a sampler on. Its other settings change nothing by
    # themselves.
    use_beam_search: Unserved = msgspec.Raw()
    num_beams: Unserved = msgspec.Raw()
    length_penalty: Unserved = msgspec.Raw()
    dry_multiplier: Unserved = msgspec.Raw()
    xtc_probability: Unserved = msgspec.Raw()
    mirostat: Unserved = msgspec.Raw()
    mirostat_mode: Unserved = msgspec.Raw()
    typical_p: Unserved = msgspec.Raw()
    typ_p: Unserved = msgspec.Raw()
    tfs_z: Unserved = msgspec.Raw()
    tfs: Unserved = msgspec.Raw()
    top_a: Unserved = msgspec.Raw()
    top_n_sigma: Unserved = msgspec.Raw()
    dynatemp_range: Unserved = msgspec.Raw()
    smoothing_factor: Unserved = msgspec.Raw()
    epsilon_cutoff: Unserved = msgspec.Raw()
    eta_cutoff: Unserved = msgspec.Raw()
    penalty_alpha: Unserved = msgspec.Raw()
    no_repeat_ngram_size: Unserved = msgspec.Raw()
    encoder_repetition_penalty: Unserved = msgspec.Raw()
    guidance_scale: Unserved = msgspec.Raw()
    cfg_scale: Unserved = msgspec.Raw()
    negative_prompt: Unserved = msgspec.Raw()
    logits_processors: Unserved = msgspec.Raw()
    # How the prompt is rendered, and what else to report about it.
    chat_template: Unserved = msgspec.Raw()
    documents: Unserved = msgspec.Raw()
    truncate_prompt_tokens: Unserved = msgspec.Raw()
    prompt_logprobs: Unserved = msgspec.Raw()
    audio: Unserved = msgspec.Raw()
    modalities: Unserved = msgspec.Raw()
    web_search_options: Unserved = msgspec.Raw()


class ChatFieldsBody(UnservedBody, kw_only=True):
    """Fields of chat and text completions that other APIs do not have."""

    min_p: Unserved = msgspec.Raw()
    repetition_penalty: Unserved = msgspec.Raw()
    repeat_penalty: Unserved = msgspec.Raw()
    frequency_penalty: Unserved = msgspec.Raw()
    presence_penalty: Unserved = msgspec.Raw()
    logit_bias: Unserved = msgspec.Raw()
    seed: Unserved = msgspec.Raw()
    n: Unserved = msgspec.Raw()
    n_predict: Unserved = msgspec.Raw()
    min_tokens: Unserved = msgspec.Raw()
    ignore_eos: Unserved = msgspec.Raw()
    stop: Unserved = msgspec.Raw()
    stop_token_ids: Unserved = msgspec.Raw()
    include_stop_str_in_output: Unserved = msgspec.Raw()
    response_format: Unserved = msgspec.Raw()
    structured_outputs: Unserved = msgspec.Raw()
    guided_json: Unserved = msgspec.Raw()
    guided_regex: Unserved = msgspec.Raw()
    guided_choice: Unserved = msgspec.Raw()
    guided_grammar: Unserved = msgspec.Raw()
    json_schema: Unserved = msgspec.Raw()
    regex: Unserved = msgspec.Raw()
    ebnf: Unserved = msgspec.Raw()
    grammar: Unserved = msgspec.Raw()
    continue_final_message: Unserved = msgspec.Raw()
    reasoning_effort: Unserved = msgspec.Raw()
    thinking_budget: Unserved = msgspec.Raw()
    thinking_token_budget: Unserved = msgspec.Raw()
    think: Unserved = msgspec.Raw()
    enable_thinking: Unserved = msgspec.Raw()
    chat_template_kwargs: Unserved = msgspec.Raw()


UNSERVED_FIELDS = tuple(UnservedBody.__annotations__)
CHAT_FIELDS = tuple(ChatFieldsBody.__annotations__)
# Fields that constrain the answer, or switch something on, even if empty.
ALWAYS_USED = frozenset(
    {
        "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
        "guided_grammar", "json_schema", "regex", "ebnf", "grammar", "enable_thinking", "think",
        "thinking", "thinking_budget", "thinking_token_budget", "reasoning_effort", "tool_choice",
    }
)  # fmt: skip


def refuse_unserved(body: UnservedBody, *more: str) -> None:
    """Raise RequestError, which names the field, if any of these fields, or of the fields `more`,
    is used. Its value may be long and is not repeated.
    """
    own = CHAT_FIELDS if isinstance(body, ChatFieldsBody) else ()
    for name in (*UNSERVED_FIELDS, *own, *more):
        if sent := getattr(body, name):  # empty in nearly all cases: the field was not sent
            refuse_if_used(name, sent)


def refuse_if_used(param: str, sent: msgspec.Raw) -> None:
    """Raise RequestError if a field that is not supported is used. `param` is the path of the
    field.
    """
    name, value = param.rpartition(".")[2], bytes(sent)
    unused = ABSENT if name in ALWAYS_USED else UNUSED
    if value not in unused and value not in NEUTRAL.get(name, ()):
        raise RequestError(f"'{param}' is not served here: leave it out.", param=param)
