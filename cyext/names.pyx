# cython: language_level=3, boundscheck=False, wraparound=False
"""Names of snapshot tensors, `ls<shard>_<kind>.<layer>`: strict parse, build, rename.

Owns the grammar of numbers and kinds. Layers define which kinds exist. Does not know tensors or
files.
"""

from bisect import bisect_right

cdef int NUMBER_LIMIT = 1 << 16
cdef int KIND_LIMIT = 64


cdef int parse_number(str text, Py_ssize_t begin, Py_ssize_t end):
    """The value of the canonical decimal text[begin:end]; -1 if it is not one below the limit."""
    cdef int value = 0
    cdef Py_ssize_t i
    cdef Py_UCS4 digit
    if not 1 <= end - begin <= 5 or (text[begin] == u"0" and end - begin > 1):
        return -1
    for i in range(begin, end):
        digit = text[i]
        if digit < u"0" or digit > u"9":  # ASCII only: isdigit() takes other scripts' digits
            return -1
        value = value * 10 + <int>digit - 48
    return value if value < NUMBER_LIMIT else -1


cdef bint is_kind(str text):
    """Whether it is a lowercase letter followed by lowercase letters, digits and underscores."""
    cdef Py_UCS4 letter
    if not 1 <= len(text) <= KIND_LIMIT or not u"a" <= text[0] <= u"z":
        return False
    for letter in text:
        if not (u"a" <= letter <= u"z" or u"0" <= letter <= u"9" or letter == u"_"):
            return False
    return True


def parse_name(str name not None) -> tuple[int, str, int]:
    """Shard, kind and layer of a tensor name. Raises ValueError for any other text."""
    cdef Py_ssize_t underscore = name.find("_")
    cdef Py_ssize_t dot = name.rfind(".")
    cdef int shard = -1
    cdef int layer = -1
    if name.startswith("ls") and 2 < underscore < dot:
        shard = parse_number(name, 2, underscore)
        layer = parse_number(name, dot + 1, len(name))
    kind = name[underscore + 1 : dot] if underscore < dot else ""
    if shard < 0 or layer < 0 or not is_kind(kind):
        raise ValueError(
            f"tensor name {name!r}: expected ls<shard>_<kind>.<layer> with numbers below "
            f"{NUMBER_LIMIT} without leading zeros, kind of small letters, digits and _"
        )
    return shard, kind, layer


def format_name(shard: int, kind: str, layer: int) -> str:
    """The inverse of parse_name. Raises ValueError for what that refuses."""
    if not is_kind(kind):
        raise ValueError(f"tensor kind {kind!r}: expected small letters, digits and _")
    for word, number in (("shard", shard), ("layer", layer)):
        if not 0 <= number < NUMBER_LIMIT:
            raise ValueError(f"{word} {number}: expected 0 <= {word} < {NUMBER_LIMIT}")
    return f"ls{int(shard)}_{kind}.{int(layer)}"


def rename_table(list names not None, list begins not None) -> dict[str, str]:
    """For each name, its name under the split whose shard s holds layers [begins[s], begins[s+1]).

    The last shard holds all further layers. Order is kept. Raises ValueError for an invalid name,
    for `begins` that do not rise from 0, and if two names would become equal.
    """
    cdef dict table = {}
    if not begins or begins[0] != 0 or any(a >= b for a, b in zip(begins, begins[1:])):
        raise ValueError(f"layer begins {begins}: expected 0, then strictly rising numbers")
    for name in names:
        _, kind, layer = parse_name(name)
        table[name] = format_name(bisect_right(begins, layer) - 1, kind, layer)
    if len(set(table.values())) < len(names):
        raise ValueError("tensor names: a layer's tensor is there twice, under one shard or two")
    return table
