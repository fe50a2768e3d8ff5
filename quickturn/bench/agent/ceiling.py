"""What an infinite cache would reuse of a prompt: its longest beginning that was sent or answered before."""

_CHUNK = 256


class PrefixTree:
    """Sequences of bytes, of which only the beginnings are asked for. Adding and asking cost one look-up for
    every 256 bytes.
    """

    def __init__(self) -> None:
        self._children: list[dict[bytes, int]] = [{}]

    def add(self, sequence: bytes) -> None:
        """Remember a sequence."""
        node = 0
        for at in range(0, len(sequence), _CHUNK):
            children = self._children[node]
            key = sequence[at : at + _CHUNK]
            after = children.get(key)
            if after is None:
                after = children[key] = len(self._children)
                self._children.append({})
            node = after

    def longest(self, sequence: bytes) -> int:
        """Bytes of the longest common beginning with any sequence that was added."""
        node = at = 0
        while at < len(sequence):
            key = sequence[at : at + _CHUNK]
            children = self._children[node]
            after = children.get(key)
            if after is None or len(key) < _CHUNK:
                # Here the last sequences part; none of them is longer than a chunk.
                return at + max((_common(key, other) for other in children), default=0)
            node, at = after, at + _CHUNK
        return at


def _common(one: bytes, other: bytes) -> int:
    for at, (mine, its) in enumerate(zip(one, other, strict=False)):
        if mine != its:
            return at
    return min(len(one), len(other))
