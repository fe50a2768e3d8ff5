"""Grammars are compiled before their request is answered, so that a bad one is refused with a status."""

import asyncio
import contextlib
import logging

from starlette.requests import Request

from quickturn.engine.stream import EngineDied
from quickturn.sampling_params import Constraint
from quickturn.server.errors import ApiError, unavailable
from quickturn.server.state import ServerState
from quickturn.server.streaming import unless_gone

log = logging.getLogger("quickturn.server")

_REMEMBERED = 256


def helpful(state: ServerState, constraint: Constraint) -> bool:
    """Whether a constraint that nobody asked for is ready. If not, the engine begins to compile it, and this
    request goes on without.
    """
    if constraint.source in state.grammars:
        return True
    if constraint.source not in state.grammars_tried:
        state.grammars_tried[constraint.source] = asyncio.create_task(_try(state, constraint))
    return False


async def _try(state: ServerState, constraint: Constraint) -> None:
    with contextlib.suppress(EngineDied):
        error = await state.engine.check(constraint)
        if error:
            log.info("calls can't be held to whole JSON objects: %s", error)
        else:
            state.grammars[constraint.source] = None


async def compiled(request: Request, state: ServerState, constraint: Constraint, param: str) -> None:
    """Return when the engine has compiled the constraint. Raises ApiError naming `param` if it can't, or
    ClientGone.
    """
    if constraint.source in state.grammars:
        return
    try:
        error = await unless_gone(request, state.engine.check(constraint))
    except EngineDied as died:
        raise unavailable(str(died)) from died
    if error:
        raise ApiError(400, f"{param}: {error}", param=param, code="invalid_grammar")
    state.grammars[constraint.source] = None
    if len(state.grammars) > _REMEMBERED:
        del state.grammars[next(iter(state.grammars))]
