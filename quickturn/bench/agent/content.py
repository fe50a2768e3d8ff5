"""What pieces say: pseudo-random words or token ids, fixed by a piece's name."""

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from quickturn.bench.agent.sessions import Piece

_COMMON = """
the of and to in is that it was for on are as with his they at be this from have or by one had not but what
all were when we there can an your which their said if do will each about how up out them then she many some
so these would other into has more her two like him see time could no make than first been its who now
people my made over did down only way find use may water long little very after words called just where most
know get through back much before go good new write our used me man too any day same right look think also
around another came come work three word must because does part even place well such here take why things
help put years different away again off went old number great tell men say small every found still between
name should home big give air line set own under read last never us left end along while might next sound
below saw something thought both few those always looked show large often together asked house world going
want school important until form food keep children feet land side without boy once
"""
WORDS = tuple(_COMMON.split())
"""Words that common tokenizers have as one token each, behind a space."""


def ids(pieces: Iterable[Piece], low: int, high: int) -> NDArray[np.int32]:
    """Token ids of `pieces`, from `low` up to `high` exclusive: int32, as many as the pieces have tokens."""
    parts = [_rng(piece.key).integers(low, high, piece.tokens, dtype=np.int32) for piece in pieces]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def words(pieces: Iterable[Piece], tokens_per_word: float) -> str:
    """Words of `pieces` with a space between them, about as many tokens as the pieces have.

    How many words a piece has depends on where it ends, so that rounding doesn't add up.
    """
    said: list[str] = []
    end = 0
    for piece in pieces:
        end += piece.tokens
        count = max(0, round(end / tokens_per_word) - len(said))
        said.extend(WORDS[at] for at in _rng(piece.key).integers(0, len(WORDS), count).tolist())
    return " ".join(said)


def _rng(key: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(blake2b(key.encode(), digest_size=8).digest()))
