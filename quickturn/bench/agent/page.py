"""One page for any number of runs: HTML with its style, script and data inside, nothing from elsewhere."""

import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

_KEPT = ("label", "gpus", "load", "figures", "client", "server", "environment", "over_time", "machine")


def write_page(path: Path, results: Sequence[dict[str, Any]], title: str = "Agent sessions") -> None:
    """Write the page of `results` of `quickturn bench agent`. Raises ValueError for none."""
    if not results:
        raise ValueError("a page needs at least one result")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(results, title), encoding="utf-8")


def render(results: Sequence[dict[str, Any]], title: str) -> str:
    """The page as text."""
    runs = [{key: result[key] for key in _KEPT if key in result} for result in results]
    runs.sort(key=lambda run: (run["label"], run["load"]["concurrency"], run["environment"]["time"]))
    data = json.dumps({"title": title, "runs": runs}, separators=(",", ":"))
    parts = {
        "STYLE": _static("page.css"),
        "SCRIPT": _static("page.js"),
        # Nothing in the data can end the script element that holds it.
        "DATA": data.replace("<", "\\u003c"),
    }
    page = _static("page.html")
    for name, text in parts.items():
        page = page.replace(f"/*{name}*/", text)
    return page


def _static(name: str) -> str:
    return (resources.files("quickturn.bench.agent") / "static" / name).read_text(encoding="utf-8")
