"""Fields of other servers that would change the answer and are not served here.

They are refused if they are used: an answer without the constraint that was asked for is worse than
none. Fields that only affect speed are ignored, like all unknown fields.
"""

from __future__ import annotations

import msgspec

from luceasync.errors import RequestError
from luceasync.server.fields import GenerationBody

ABSENT = (b"", b"null")
# Values that send a field without using it.
UNUSED = frozenset(
    {*ABSENT, b"false", b"0", b"0.0", b'""', b"[]", b"{}", b'"none"', b'"auto"', b'["text"]'}
)
ONE = frozenset({b"1", b"1.0"})
# Further such values by field.
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
    """Fields that no API has, kept undecoded."""

    # Tools, before there was `tools`.
    functions: msgspec.Raw = msgspec.Raw()
    function_call: msgspec.Raw = msgspec.Raw()
    # Which tokens an answer may have, and where it ends.
    bad_words: msgspec.Raw = msgspec.Raw()
    banned_strings: msgspec.Raw = msgspec.Raw()
    banned_tokens: msgspec.Raw = msgspec.Raw()
    custom_token_bans: msgspec.Raw = msgspec.Raw()
    allowed_token_ids: msgspec.Raw = msgspec.Raw()
    stop_regex: msgspec.Raw = msgspec.Raw()
    # How tokens are drawn: the switch of each sampler. What only tunes one changes nothing.
    use_beam_search: msgspec.Raw = msgspec.Raw()
    num_beams: msgspec.Raw = msgspec.Raw()
    length_penalty: msgspec.Raw = msgspec.Raw()
    dry_multiplier: msgspec.Raw = msgspec.Raw()
    xtc_probability: msgspec.Raw = msgspec.Raw()
    mirostat: msgspec.Raw = msgspec.Raw()
    mirostat_mode: msgspec.Raw = msgspec.Raw()
    typical_p: msgspec.Raw = msgspec.Raw()
    typ_p: msgspec.Raw = msgspec.Raw()
    tfs_z: msgspec.Raw = msgspec.Raw()
    tfs: msgspec.Raw = msgspec.Raw()
    top_a: msgspec.Raw = msgspec.Raw()
    top_n_sigma: msgspec.Raw = msgspec.Raw()
    dynatemp_range: msgspec.Raw = msgspec.Raw()
    smoothing_factor: msgspec.Raw = msgspec.Raw()
    epsilon_cutoff: msgspec.Raw = msgspec.Raw()
    eta_cutoff: msgspec.Raw = msgspec.Raw()
    penalty_alpha: msgspec.Raw = msgspec.Raw()
    no_repeat_ngram_size: msgspec.Raw = msgspec.Raw()
    encoder_repetition_penalty: msgspec.Raw = msgspec.Raw()
    guidance_scale: msgspec.Raw = msgspec.Raw()
    cfg_scale: msgspec.Raw = msgspec.Raw()
    negative_prompt: msgspec.Raw = msgspec.Raw()
    logits_processors: msgspec.Raw = msgspec.Raw()
    # How the prompt is made, and what else to report of it.
    chat_template: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()
    truncate_prompt_tokens: msgspec.Raw = msgspec.Raw()
    prompt_logprobs: msgspec.Raw = msgspec.Raw()
    audio: msgspec.Raw = msgspec.Raw()
    modalities: msgspec.Raw = msgspec.Raw()
    web_search_options: msgspec.Raw = msgspec.Raw()


class ChatFieldsBody(UnservedBody, kw_only=True):
    """Fields that chat and text completions have, and other APIs have not."""

    min_p: msgspec.Raw = msgspec.Raw()
    repetition_penalty: msgspec.Raw = msgspec.Raw()
    repeat_penalty: msgspec.Raw = msgspec.Raw()
    frequency_penalty: msgspec.Raw = msgspec.Raw()
    presence_penalty: msgspec.Raw = msgspec.Raw()
    logit_bias: msgspec.Raw = msgspec.Raw()
    seed: msgspec.Raw = msgspec.Raw()
    n: msgspec.Raw = msgspec.Raw()
    n_predict: msgspec.Raw = msgspec.Raw()
    min_tokens: msgspec.Raw = msgspec.Raw()
    ignore_eos: msgspec.Raw = msgspec.Raw()
    stop: msgspec.Raw = msgspec.Raw()
    stop_token_ids: msgspec.Raw = msgspec.Raw()
    include_stop_str_in_output: msgspec.Raw = msgspec.Raw()
    response_format: msgspec.Raw = msgspec.Raw()
    structured_outputs: msgspec.Raw = msgspec.Raw()
    guided_json: msgspec.Raw = msgspec.Raw()
    guided_regex: msgspec.Raw = msgspec.Raw()
    guided_choice: msgspec.Raw = msgspec.Raw()
    guided_grammar: msgspec.Raw = msgspec.Raw()
    json_schema: msgspec.Raw = msgspec.Raw()
    regex: msgspec.Raw = msgspec.Raw()
    ebnf: msgspec.Raw = msgspec.Raw()
    grammar: msgspec.Raw = msgspec.Raw()
    continue_final_message: msgspec.Raw = msgspec.Raw()
    reasoning_effort: msgspec.Raw = msgspec.Raw()
    thinking_budget: msgspec.Raw = msgspec.Raw()
    thinking_token_budget: msgspec.Raw = msgspec.Raw()
    think: msgspec.Raw = msgspec.Raw()
    enable_thinking: msgspec.Raw = msgspec.Raw()
    chat_template_kwargs: msgspec.Raw = msgspec.Raw()


UNSERVED_FIELDS = tuple(UnservedBody.__annotations__)
CHAT_FIELDS = tuple(ChatFieldsBody.__annotations__)
# Empty, these would still be a constraint, or a switch.
ALWAYS_USED = frozenset(
    {
        "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice",
        "guided_grammar", "json_schema", "regex", "ebnf", "grammar", "enable_thinking", "think",
        "thinking", "thinking_budget", "thinking_token_budget", "reasoning_effort", "tool_choice",
    }
)  # fmt: skip


def refuse_unserved(body: UnservedBody, *more: str) -> None:
    """Raise RequestError, which names the field, if one is used, or one of `more`. Its value may be
    long and is not repeated.
    """
    own = CHAT_FIELDS if isinstance(body, ChatFieldsBody) else ()
    for name in (*UNSERVED_FIELDS, *own, *more):
        refuse_if_used(name, getattr(body, name))


def refuse_if_used(param: str, sent: msgspec.Raw) -> None:
    """Raise RequestError if the value of a field that is not served says anything. `param`: the
    field's path.
    """
    name, value = param.rpartition(".")[2], bytes(sent)
    unused = ABSENT if name in ALWAYS_USED else UNUSED
    if value not in unused and value not in NEUTRAL.get(name, ()):
        raise RequestError(f"'{param}' is not served here: leave it out.", param=param)
