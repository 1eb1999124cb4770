"""Custom tools as functions with one text argument, and Lark grammars as regular expressions.

Source: Lark's documentation, "Grammar Reference". Owns which grammars can become one expression:
those without recursive rules. Independent of the notation of calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from luceasync.server.fields import refuse, with_whole_characters
from luceasync.server.openai.request_body import MAX_GRAMMAR_CHARS

INPUT = "input"  # the argument of a custom tool
INPUT_SCHEMA = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
SYNTAXES = ("lark", "regex")


def custom_function(
    where: str, name: str, description: str | None, syntax: str | None, definition: str | None
) -> dict[str, Any]:
    """The function that replaces a custom tool. Its text must match a regular expression, or a
    grammar that can be converted to one; the description quotes any grammar. Raises RequestError,
    which names the field below `where`.
    """
    if not definition:
        return {"name": name, "description": description or "", "parameters": INPUT_SCHEMA}
    if syntax not in SYNTAXES:
        refuse(f"{where}.syntax", syntax, "'lark' or 'regex'")
    if len(definition) > MAX_GRAMMAR_CHARS:
        refuse(f"{where}.definition", definition, f"at most {MAX_GRAMMAR_CHARS} characters")
    shown = f"The text of `{INPUT}` follows this {syntax} grammar:\n{definition}"
    function = {"name": name, "description": "\n\n".join(filter(None, [description, shown]))}
    try:
        regex = lark_regex(definition) if syntax == "lark" else definition
    except NotRegular:
        return {**function, "parameters": INPUT_SCHEMA}
    except UnknownRule as error:
        refuse(f"{where}.definition", str(error), "a grammar that defines it")
    text = {"type": "string", "pattern": f"^(?:{regex})$"}
    return {**function, "parameters": {**INPUT_SCHEMA, "properties": {INPUT: text}}, "strict": True}


def input_arguments(text: str) -> str:
    """The arguments of the function for a custom tool's input."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def input_of(arguments: str) -> str:
    """The input of a custom tool; `arguments` unchanged if they do not contain it."""
    try:
        match msgspec.json.decode(with_whole_characters(arguments.encode())):
            case {"input": str(text)}:
                return text
            case _:
                return arguments
    except (msgspec.DecodeError, RecursionError):
        return arguments


# --- grammars in Lark ---------------------------------------------------------------------------

MAX_REGEX_CHARS = 64 << 10
MAX_BUILT_CHARS = 1 << 20  # of all expressions of one grammar
MAX_DEPTH = 100  # of rules within rules, and of groups
TOKEN = re.compile(
    r'(?P<blank>[ \t\f]+|(?://|\#)[^\n]*|\\\n)|(?P<line>\r?\n)|(?P<string>"(?:\\.|[^"\\\n])*"i?)'
    r"|(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[a-z]*)|(?P<name>(?m:^[?!]{1,2})?_?[A-Za-z][A-Za-z0-9_]*)"
    r"|(?P<directive>%[a-z]+)|(?P<number>\d+)|(?P<sign>\.\.|->|[:|()\[\]{}*+?~.,])"
)
ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "b": "\b"}
ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|(.))")
# Parts of a regular expression whose meaning depends on the surrounding text or on the dialect.
ODD_REGEX = re.compile(r"\\[1-9bBAZzGkpP<>]|\(\?(?!:|[is]+:)")
OUTSIDE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]")  # escapes and sets hold no anchors
_LETTER, _NUMBER = "[A-Za-z]", r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[Ee][+-]?[0-9]+)?"
_FLOAT = r"(?:[0-9]+[Ee][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[Ee][+-]?[0-9]+)?)"
COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9A-Fa-f]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": f"[+-]?{_FLOAT}",
    "NUMBER": _NUMBER,
    "SIGNED_NUMBER": f"[+-]?{_NUMBER}",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": _LETTER,
    "WORD": f"{_LETTER}+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}


class NotRegular(Exception):
    """A grammar that cannot be converted to one regular expression."""


class UnknownRule(Exception):
    """A name that the grammar uses but does not define."""


def lark_regex(grammar: str) -> str:
    """A regular expression for the texts of a Lark grammar, in the syntax that Rust and Python
    share.

    Raises UnknownRule, and NotRegular for a grammar with recursion, templates, directives other
    than `%import common` and `%ignore`, or parts of expressions that depend on the surrounding
    text.
    """
    return _LarkGrammar(grammar).expression()


class _Token(NamedTuple):
    kind: str
    text: str
    begins_line: bool


def _tokens(grammar: str) -> Iterator[_Token]:
    place, begins_line = 0, True
    while place < len(grammar):
        found = TOKEN.match(grammar, place)
        if found is None or found.lastgroup is None:
            raise NotRegular
        if found.lastgroup not in ("blank", "line"):
            yield _Token(found.lastgroup, found[0], begins_line)
        begins_line = found.lastgroup == "line" or (begins_line and found.lastgroup == "blank")
        place = found.end()


class _LarkGrammar:
    """The rules of a grammar by name, and their expressions once they are built."""

    def __init__(self, grammar: str) -> None:
        self._rules: dict[str, list[_Token]] = {}
        self._known: dict[str, str] = {}
        self._open: list[str] = []  # rules whose expressions are being built
        self._ignored: list[str] = []
        self._num_built = 0
        ignored = []
        for statement in _statements(grammar):
            match statement[0]:
                case _Token("name", name) if statement[1].text == ":":
                    self._rules[name.lstrip("?!")] = statement[2:]
                case _Token("name", name) if statement[1].text == ".":  # with a priority
                    self._rules[name.lstrip("?!")] = statement[4:]
                case _Token("directive", "%ignore"):
                    ignored.append(statement[1:])
                case _Token("directive", "%import"):
                    self._known |= _imported([token.text for token in statement[1:]])
                case _:
                    raise NotRegular
        self._ignored = [self._alternatives(_Reader(each), in_rule=False) for each in ignored]

    @property
    def _space(self) -> str:
        """An expression for the ignored text that may precede a terminal in a rule."""
        return f"(?:{'|'.join(self._ignored)})*" if self._ignored else ""

    def expression(self) -> str:
        return self._of("start") + self._space

    def _of(self, name: str) -> str:
        """The expression of a rule or a terminal."""
        if name not in self._known:
            if name not in self._rules:
                raise UnknownRule(name)
            if name in self._open or len(self._open) > MAX_DEPTH:
                raise NotRegular
            self._open.append(name)
            reader = _Reader(self._rules[name])
            self._known[name] = self._alternatives(reader, in_rule=not name.isupper())
            self._open.pop()
        return self._known[name]

    def _alternatives(self, reader: _Reader, *, in_rule: bool) -> str:
        """The expression of alternatives up to the end or to their closing bracket."""
        options = [self._sequence(reader, in_rule=in_rule)]
        while reader.takes("|"):
            options.append(self._sequence(reader, in_rule=in_rule))
        if reader.depth == 0 and reader.next is not None:
            raise NotRegular
        return self._counted(f"(?:{'|'.join(options)})" if len(options) > 1 else options[0])

    def _sequence(self, reader: _Reader, *, in_rule: bool) -> str:
        parts = []
        while reader.next is not None and reader.next.text not in ("|", ")", "]", "->"):
            parts.append(self._repeated(reader, in_rule=in_rule))
        if reader.takes("->"):  # a name for the syntax tree
            reader.take("name")
        return self._counted("".join(parts))

    def _repeated(self, reader: _Reader, *, in_rule: bool) -> str:
        """The expression of an atom and its quantifier."""
        atom = self._atom(reader, in_rule=in_rule)
        if reader.takes("~"):
            least = reader.take("number").text
            most = reader.take("number").text if reader.takes("..") else least
        elif reader.takes("{"):
            least = reader.take("number").text
            has_comma = reader.takes(",")
            is_number = reader.next is not None and reader.next.kind == "number"
            most = reader.take("number").text if is_number else ("" if has_comma else least)
            reader.close("}")
        else:
            signs = (sign for sign in ("*", "+", "?") if reader.takes(sign))
            sign = next(signs, "")
            return self._counted(f"(?:{atom}){sign}" if sign else atom)
        return self._counted(f"(?:{atom}){{{least},{most}}}")

    def _atom(self, reader: _Reader, *, in_rule: bool) -> str:
        token = reader.take()
        space = self._space if in_rule else ""
        match token.kind:
            case "name":
                name = token.text
                if reader.begins_template() or not (in_rule or name.isupper()):
                    raise NotRegular  # terminals may consist of terminals only
                return (space if name.isupper() else "") + self._of(name)
            case "string" if reader.takes(".."):
                return space + _range(token.text, reader.take("string").text)
            case "string":
                return space + _literal(token.text)
            case "regex":
                return space + _regex(token.text)
        if token.text not in ("(", "["):
            raise NotRegular
        reader.depth += 1
        if reader.depth > MAX_DEPTH:
            raise NotRegular
        inner = self._alternatives(reader, in_rule=in_rule)
        reader.close({"(": ")", "[": "]"}[token.text])
        reader.depth -= 1
        return f"(?:{inner})" + ("?" if token.text == "[" else "")

    def _counted(self, regex: str) -> str:
        self._num_built += len(regex)
        if len(regex) > MAX_REGEX_CHARS or self._num_built > MAX_BUILT_CHARS:
            raise NotRegular
        return regex


class _Reader:
    """Reads the tokens of one statement. `depth` is the number of open brackets."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = tokens
        self._place = 0
        self.depth = 0

    @property
    def next(self) -> _Token | None:
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def takes(self, sign: str) -> bool:
        """Consume `sign` if it is next, and return whether it was."""
        found = self.next is not None and self.next.text == sign
        self._place += found
        return found

    def begins_template(self) -> bool:
        """Whether a template's arguments follow, rather than a number of repetitions."""
        following = self._tokens[self._place : self._place + 2]
        return len(following) == 2 and following[0].text == "{" and following[1].kind != "number"

    def take(self, kind: str = "") -> _Token:
        """Consume and return the next token. Raises NotRegular for one of another kind."""
        token = self.next
        if token is None or (kind and token.kind != kind):
            raise NotRegular
        self._place += 1
        return token

    def close(self, sign: str) -> None:
        if not self.takes(sign):
            raise NotRegular


def _statements(grammar: str) -> Iterator[list[_Token]]:
    """The tokens of each rule, terminal and directive."""
    tokens = [*_tokens(grammar)]
    begins = [
        i
        for i, token in enumerate(tokens)
        if token.begins_line
        and (token.kind == "directive" or (token.kind == "name" and _defines(tokens, i)))
    ]
    if not begins or begins[0] != 0:
        raise NotRegular
    for begin, end in zip(begins, [*begins[1:], len(tokens)], strict=True):
        if end - begin < 2:
            raise NotRegular
        yield tokens[begin:end]


def _defines(tokens: list[_Token], place: int) -> bool:
    """Whether a definition of the name at `place` begins: a colon follows, perhaps after a
    priority.
    """
    following = [token.text for token in tokens[place + 1 : place + 4]]
    return following[:1] == [":"] or (following[:1] == ["."] and following[2:] == [":"])


def _imported(words: list[str]) -> Mapping[str, str]:
    """The terminals of an `%import` from `common`, by the names that they get."""
    match words:
        case ["common", ".", name] if name in COMMON:
            return {name: COMMON[name]}
        case ["common", ".", name, "->", other] if name in COMMON:
            return {other: COMMON[name]}
        case ["common", "(", *listed, ")"]:
            names = [word for word in listed if word != ","]
            if all(name in COMMON for name in names):
                return {name: COMMON[name] for name in names}
    raise NotRegular


def _literal(written: str) -> str:
    text = "".join(map(_escaped, _unquoted(written.removesuffix("i"))))
    return f"(?i:{text})" if written.endswith("i") else text


def _unquoted(written: str) -> str:
    """The text of a string literal. Raises NotRegular for an unknown escape."""

    def char(found: re.Match[str]) -> str:
        if code := found[1] or found[2]:
            return chr(int(code, 16))
        if found[3] not in ESCAPES and found[3].isalnum():
            raise NotRegular
        return ESCAPES.get(found[3], found[3])

    return ESCAPE.sub(char, written[1:-1])


def _escaped(char: str) -> str:
    if char in "\n\t\r\f":
        return {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\f": r"\f"}[char]
    if "\ud800" <= char <= "\udfff" or not (char.isprintable() or char > "\xa0"):
        raise NotRegular
    return f"\\{char}" if char in r"\.+*?()|[]{}^$-&~" else char


def _range(begin: str, end: str) -> str:
    first, last = _unquoted(begin), _unquoted(end)
    if len(first) != 1 or len(last) != 1 or first > last:
        raise NotRegular
    return f"[{_escaped(first)}-{_escaped(last)}]"


def _regex(written: str) -> str:
    """The regular expression between slashes. Raises NotRegular for one of another dialect."""
    body, _, flags = written[1:].rpartition("/")
    outside = OUTSIDE.sub("", body)
    if ODD_REGEX.search(body) or "^" in outside or "$" in outside or set(flags) - set("isu"):
        raise NotRegular
    body = re.sub(r"\\(.)", lambda found: "/" if found[1] == "/" else found[0], body)
    flags = "".join(sorted(set(flags) - {"u"}))
    return f"(?{flags}:{body})"
