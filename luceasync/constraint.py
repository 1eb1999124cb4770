"""What an answer's text has to be, in the words of whoever asks. Knows no grammar and no tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer's text has to be. `source` says it: the JSON of a schema (for "json_object"
    it is none: any object will do), a regular expression of all of the text, a JSON list of texts,
    or a grammar in the notation of Lark or GBNF. `param` names the field that has it, in refusals.
    `strict`: a word of a schema that cannot be enforced is refused; otherwise it says nothing.
    """

    kind: Literal["json_schema", "json_object", "regex", "choice", "grammar"]
    source: str
    param: str
    strict: bool = True
