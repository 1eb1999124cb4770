"""The settings of lanes that keep a part of their context on devices; a part of the table in
luceasync.options.
"""

from __future__ import annotations

from luceasync import parsers
from luceasync.option import Option

POLICIES = ("qk", "drafter", "lru")

KVFLASH_OPTIONS: tuple[Option, ...] = (
    Option(
        "kvflash",
        "kvflash",
        "pool_tokens",
        parsers.whole_or_auto(64),
        "auto, or a whole number of tokens, at least 64, such as 8K",
        "TOKENS|auto",
        "Tokens of each lane's context that stay on the devices; host memory holds all of it.",
    ),
    Option(
        "kvflash-policy",
        "kvflash",
        "policy",
        parsers.one_of(*POLICIES),
        " | ".join(POLICIES),
        "|".join(POLICIES),
        "By what they are chosen: the model's own attention, the drafter's, or age alone.",
        needs="kvflash",
    ),
    Option(
        "kvflash-tau",
        "kvflash",
        "tau_tokens",
        parsers.whole(1, 2**20),
        "a whole number of tokens from 1 to 1048576",
        "TOKENS",
        "Tokens of an answer after which they are chosen anew.",
        needs="kvflash",
    ),
    Option(
        "kvflash-pin-spans",
        "kvflash",
        "pins",
        parsers.spans,
        "spans of tokens begin:end with commas, the end not included, such as 0:512",
        "LO:HI,...",
        "Tokens of every lane that stay on the devices whatever they are worth.",
        needs="kvflash",
    ),
)
