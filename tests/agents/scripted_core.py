"""An engine core that plays a model in a coding agent's hands: calls tools in turn, then says it is done.

AGENT_CALLS is a JSON list of [tool name, arguments]; every tool result in the prompt moves on by one. A
prompt without AGENT_MARK (agents ask for titles and summaries on the side) is answered with one word.
"""

import json
import os
from array import array
from collections.abc import Callable
from dataclasses import replace

from fake_core import FakeCore
from tiny_text import spell

from quickturn.config import EngineConfig
from quickturn.engine.messages import AddRequest, LoadProgress

TOOL_TURN = "<<|im_start|>>tool\n"
DONE = "The tools gave what was asked for. Done."


class ScriptedCore(FakeCore):
    def __init__(self, config: EngineConfig, progress: Callable[[LoadProgress], None]) -> None:
        super().__init__(config, progress)
        self._calls = json.loads(os.environ["AGENT_CALLS"])
        self._mark = os.environ["AGENT_MARK"]

    def add(self, request: AddRequest) -> None:
        prompt = array("i")
        prompt.frombytes(request.tokens)
        text = spell(prompt.tolist())
        thinking = "So be it.\n</think>\n\n" if text.endswith("<<think>>\n") else ""
        script = {"text": thinking + (self._answer(text) if self._mark in text else "Task"), "chunk": 3}
        super().add(replace(request, session=json.dumps(script)))

    def _answer(self, prompt: str) -> str:
        done = prompt.count(TOOL_TURN)
        if done >= len(self._calls):
            return DONE
        name, arguments = self._calls[done]
        call = json.dumps({"name": name, "arguments": arguments})
        return f"Step {done + 1}.\n<tool_call>\n{call}\n</tool_call>"
