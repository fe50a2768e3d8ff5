"""The request state machine as a Mermaid diagram, from the table that the compiled code is held to.

python -m quickturn_control.diagram docs/control-plane.md     # rewrites the diagram in the page
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from quickturn_control import transitions

BEGIN = "<!-- states: python -m quickturn_control.diagram -->"
END = "<!-- end of states -->"


def mermaid() -> str:
    """The diagram. Ways to an end that every live state has are drawn once."""
    rows = transitions()
    live = {source for source, _, _ in rows}
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> Submitted: add"]
    shared: dict[tuple[str, str], set[str]] = {}
    for source, event, target in rows:
        if target not in live:
            shared.setdefault((event, target), set()).add(source)
    for source, event, target in rows:
        if shared.get((event, target)) != live:
            lines.append(f"    {source} --> {target}: {event}")
    for (event, target), sources in shared.items():
        if sources == live:
            lines.append(f"    any_live_state --> {target}: {event}")
    lines += [f"    {target} --> [*]" for target in dict.fromkeys(target for _, target in shared)]
    return "\n".join([*lines, "```"])


def rewritten(page: str) -> str:
    """The page with the diagram of today between its two marks. Raises ValueError if a mark is missing."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the page lacks {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{mermaid()}\n{END}{after}"


def main(arguments: Sequence[str]) -> None:
    """Print the diagram, or rewrite it in the named pages."""
    if not arguments:
        print(mermaid())
    for name in arguments:
        page = Path(name)
        page.write_text(rewritten(page.read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
