"""What an agent's next turn costs the text side: rendering and tokenising a session of 100k tokens.

    python benchmarks/growing_session.py --output benchmarks/results/growing_session.json

Forty turns of a coding agent: a tool reads a file, the model says something. CPU time of all threads, without
a server around it. `whole`: nothing is known of earlier turns, as for a server that has just started.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quickturn.text.answer_format import markup_of
from quickturn.text.chat_template import ChatTemplate
from quickturn.text.encoder import Encoded
from quickturn.text.rendering import WrittenAnswers, render_chat
from quickturn.text.splice import written
from quickturn.text.tokenizer import Tokenizer, load_tokenizer

TURNS, LINES = 40, 140
SCOPE = "session"
Messages = list[dict[str, Any]]


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    tokenizer = load_tokenizer("embedded")
    assert tokenizer.chat_template is not None
    template = ChatTemplate(tokenizer.chat_template, tokenizer.special)
    markup = markup_of(tokenizer)
    answers = WrittenAnswers(template, markup)

    def grow(messages: Messages, turn: int) -> None:
        text = f"I have read part {turn}, and look at the next one.\n\n" + "It holds what I expected. " * 20
        answer = written(tokenizer, markup, tokenizer.encode(text), False, text.strip(), [])
        assert answer is not None
        answers.store.keep(SCOPE, [], answer)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": file(turn)}]

    messages: Messages = [
        {"role": "system", "content": file(-1) * 2},
        {"role": "user", "content": "Find the fault."},
    ]
    turns = []
    for turn in range(1, TURNS + 1):
        grow(messages, turn)
        fresh = Tokenizer(
            tokenizer.backend, tokenizer.special, tokenizer.eos_ids, chat_template=tokenizer.chat_template
        )
        fresh.encoder.encode(["x"])

        def render(with_tokenizer: Tokenizer) -> Encoded:
            return render_chat(with_tokenizer, template, messages, None, None, answers, SCOPE, True)

        prompt, next_ms = timed(render, tokenizer)
        again, whole_ms = timed(render, fresh)
        assert again == prompt
        turns.append(
            {"turn": turn, "tokens": len(prompt.ids), "ms": round(next_ms, 2), "whole_ms": round(whole_ms, 2)}
        )
        if turn % 8 == 0:
            print(json.dumps(turns[-1]), flush=True)
    machine = {
        "cpu": platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
    }
    report = {"command": " ".join(["python", *sys.argv]), "machine": machine, "turns": turns}
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")


def file(part: int) -> str:
    """Lines of code, other ones for each part."""
    lines = Path(__file__).read_text().splitlines(keepends=True)
    return "".join(f"{part}:{number} {lines[(part * 7 + number) % len(lines)]}" for number in range(LINES))


def timed(work: Callable[[Tokenizer], Encoded], tokenizer: Tokenizer) -> tuple[Encoded, float]:
    """Its result, and the milliseconds of all threads' CPU time that it took."""
    started = time.process_time()
    result = work(tokenizer)
    return result, (time.process_time() - started) * 1e3


if __name__ == "__main__":
    main()
