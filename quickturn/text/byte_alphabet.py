"""GPT-2's spelling of bytes as printable characters, which every byte-level vocabulary uses.

Printable Latin-1 bytes stand for themselves; the other 68 bytes take the code points from 256 on, in order.
"""

_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in frozenset(_PRINTABLE)]

CHAR_OF_BYTE: dict[int, str] = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + index) for index, byte in enumerate(_OTHERS)
}
BYTE_OF_CHAR: dict[str, int] = {char: byte for byte, char in CHAR_OF_BYTE.items()}


def spelled_bytes(token: str) -> bytes:
    """The bytes of a byte-level token; a token with any character outside the alphabet stands for its own
    UTF-8."""
    try:
        return bytes([BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode("utf-8")
