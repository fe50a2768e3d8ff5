"""Which group of ranks gets a request: the one that has the least to do before its first token.

A group's work is what its unfinished requests are expected to compute, and what the new one would: its prompt
without the blocks that the group has seen. That keeps a conversation where its cache is, until another group
is so much idler that computing the prompt again is quicker.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from quickturn.engine.messages import AddRequest

_BLOCKS = 1 << 18
"""Blocks that are remembered of each group."""
_SESSIONS = 1 << 14
_EXPECTED_ANSWER = 256
"""Tokens of an answer, as far as they count as work; a token decoded takes a group longer than one of a
prompt, but many are decoded at once."""

Block = tuple[int, int]
"""Identity of a full block, which stands for all tokens before its end as well."""


@dataclass
class Group:
    """What was sent to one group."""

    seen: "OrderedDict[Block, None]" = field(default_factory=OrderedDict)
    work: dict[int, int] = field(default_factory=dict)
    """Tokens to compute for each unfinished request."""

    def known(self, blocks: Sequence[Block]) -> int:
        """How many blocks of a prompt, from its start, this group has seen."""
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            if blocks[middle - 1] in self.seen:
                low = middle
            else:
                high = middle - 1
        return low

    def note(self, blocks: Sequence[Block]) -> None:
        """These are seen; the oldest of too many are forgotten, ends of prompts before their beginnings."""
        for block in reversed(blocks):
            self.seen[block] = None
            self.seen.move_to_end(block)
        while len(self.seen) > _BLOCKS:
            self.seen.popitem(last=False)


class Router:
    """Chooses, and remembers where everything went."""

    def __init__(self, groups: int, block_tokens: int) -> None:
        """Of so many groups."""
        self._groups = [Group() for _ in range(groups)]
        self._block_tokens = block_tokens
        self._of_request: dict[int, int] = {}
        self._of_session: OrderedDict[str, int] = OrderedDict()

    def choose(self, request: AddRequest, blocks: Sequence[Block]) -> int:
        """The group for a new request, whose prompt has these full blocks. Ties go to the session's group,
        then to the first.
        """
        prompt = len(request.tokens) // 4
        session = self._of_session.get(request.session, -1) if request.session else -1
        best, best_cost, best_new = 0, (0, False), 0
        for index, group in enumerate(self._groups):
            new = prompt - group.known(blocks) * self._block_tokens
            cost = (sum(group.work.values()) + new, index != session)
            if index == 0 or cost < best_cost:
                best, best_cost, best_new = index, cost, new
        chosen = self._groups[best]
        chosen.note(blocks)
        chosen.work[request.id] = best_new + min(_EXPECTED_ANSWER, request.sampling.max_tokens)
        self._of_request[request.id] = best
        if request.session:
            self._of_session[request.session] = best
            self._of_session.move_to_end(request.session)
            if len(self._of_session) > _SESSIONS:
                self._of_session.popitem(last=False)
        return best

    def of_request(self, id: int) -> int | None:
        """Where an unfinished request is."""
        return self._of_request.get(id)

    def of_session(self, session: str) -> int | None:
        """Where a session's last request went."""
        return self._of_session.get(session)

    def over(self, id: int) -> None:
        """A request has ended."""
        group = self._of_request.pop(id, None)
        if group is not None:
            del self._groups[group].work[id]
