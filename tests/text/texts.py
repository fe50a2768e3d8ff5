"""Random texts that tokenizers find hard."""

import random

_SCRIPTS = (
    "abcdefgh XYZ",
    " \n\t\r",
    "0123456789",
    ".,!?'\"()<>|_-",
    "éßñüøå",
    "你好世界",
    "🙂🚀👩‍👩‍👧",
    "١٢٣½",
    "\u0301e\u0301",
)
_WORDS = (
    " the",
    "It's",
    "don't",
    " 2024",
    "<|im_end|>",
    "<|im_start|>",
    "function(",
    "\n\n",
    "    ",
    "Straße",
)


def random_text(rng: random.Random, length: int = 30) -> str:
    """Words, scripts, digits, white space, control tokens and any code points, in any order."""
    parts = []
    for _ in range(rng.randrange(length)):
        kind = rng.randrange(8)
        if kind < 5:
            parts.append(rng.choice(rng.choice(_SCRIPTS)))
        elif kind < 7:
            parts.append(rng.choice(_WORDS))
        else:
            code = rng.choice((rng.randrange(1, 0xD800), rng.randrange(0xE000, 0x110000)))
            parts.append(chr(code))
    return "".join(parts)
