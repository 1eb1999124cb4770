"""Tensors in one buffer, a byte at a time: the slow truth of luceasync.cyext.flatten."""


def layout(specs: list[tuple[str, int]], alignment: int) -> tuple[list[int], int]:
    """Where each (name, bytes) begins, and the end of the last one."""
    offsets, end = [], 0
    for _, num_bytes in specs:
        while end % alignment:
            end += 1
        offsets.append(end)
        end += num_bytes
    return offsets, end


def fill(target: bytes, offsets: list[int], sources: list[bytes]) -> bytes | None:
    """`target` after a fill, or None where the sources have no places in it."""
    places = list(zip(offsets, sources, strict=True))
    if any(begin < 0 or begin + len(source) > len(target) for begin, source in places):
        return None
    filled, end = list(target), None
    for begin, source in places:
        if end is not None and begin < end:
            return None
        for position in range(begin if end is None else end, begin):
            filled[position] = 0
        for position, byte in enumerate(source, begin):
            filled[position] = byte
        end = begin + len(source)
    return bytes(filled)


def views(buffer: bytes, table: list[tuple[str, int, int]]) -> dict[str, bytes] | None:
    """The bytes of each (name, offset, bytes), or None where one is not inside `buffer`."""
    positions = range(len(buffer))
    found = {}
    for name, begin, num_bytes in table:
        if begin < 0 or begin > len(buffer) or num_bytes < 0:
            return None
        wanted = range(begin, begin + num_bytes)
        if any(position not in positions for position in wanted):
            return None
        found[name] = bytes(buffer[position] for position in wanted)
    return found
