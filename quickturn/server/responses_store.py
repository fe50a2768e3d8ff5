"""Responses that later ones may go on from: bounded, in memory, each visible to the key that made it."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quickturn.server.errors import ApiError

Item = dict[str, Any]


@dataclass(frozen=True)
class StoredResponse:
    """A response as it was answered. `items`: the whole conversation behind it, its output included;
    `input`: the items that the request itself brought. `size`: about how many bytes it keeps alive.
    """

    owner: str
    response: Item
    input: Sequence[Item]
    items: Sequence[Item]
    size: int


class ResponseStore:
    """Keeps the responses that were used last, at most so many and so many bytes.

    A conversation's items are shared by its responses, so that a long one is held once.
    """

    def __init__(self, responses: int = 4096, bytes: int = 256 << 20) -> None:
        """`responses` and `bytes` bound what is kept."""
        self._limits = (responses, bytes)
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self._bytes = 0

    def put(self, id: str, stored: StoredResponse) -> None:
        """Keep `stored`; the ones that nobody used for longest make room."""
        self._kept[id] = stored
        self._bytes += stored.size
        responses, bytes = self._limits
        while len(self._kept) > responses or self._bytes > bytes:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.size

    def get(self, id: str, owner: str, param: str | None = None) -> StoredResponse:
        """The response `id` of `owner`. Raises a 404 that blames `param` when it isn't, or isn't any more,
        here.
        """
        stored = self._kept.get(id)
        if stored is None or stored.owner != owner:
            raise ApiError(
                404,
                f"there is no response {id!r} here: it was never stored, was deleted, or made room for "
                "newer ones; send the whole conversation as input",
                param=param,
                code="response_not_found",
            )
        self._kept.move_to_end(id)
        return stored

    def remove(self, id: str, owner: str) -> None:
        """Forget a response. Raises a 404 as `get` does."""
        self._bytes -= self.get(id, owner).size
        del self._kept[id]
