"""The explained program as a drawing: one column for each kind of layer, one box a step, one pill a move.

Self-contained SVG. To the left of the boxes runs the residual stream: a thin line where every rank of a group
holds all of its tokens, a dashed one where its ranks have shared them out.
"""

from collections.abc import Sequence
from html import escape

from quickturn.parallel.explain import Explained, Line, Section
from quickturn.parallel.explain_text import ranks, share, size, time, title

_COLUMN, _GAP, _BOX, _LANE, _MARGIN, _ROW = 500, 30, 376, 44, 32, 46
_COLORS = {
    "attn": ("#e8f0fe", "#3367d6"),
    "dense": ("#e6f4ea", "#188038"),
    "moe": ("#f3e8fd", "#8430ce"),
    "vocab": ("#f1f3f4", "#5f6368"),
}
_WARM = ("#fef0e1", "#d9730d")
_STYLE = """
text { font-family: system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #202124 }
.t { font-size: 20px; font-weight: 600 } .h { font-size: 15px; font-weight: 600 }
.n { font-size: 13px } .s { font-size: 11px; fill: #5f6368 } .b { font-size: 13px; font-weight: 600 }
"""


def svg(name: str, explained: Explained) -> str:
    """The drawing; `name`: what it is of."""
    columns = _columns(explained.sections)
    slowest = max(line.seconds for section in explained.sections for line in section.lines)
    top, bottom, parts = 132, 0, list[str]()
    for place, column in enumerate(columns):
        y = top
        for section in column:
            parts.append(_section(section, _MARGIN + place * (_COLUMN + _GAP), y, slowest, explained))
            y += _height(section)
        bottom = max(bottom, y)
    width = max(2 * _MARGIN + len(columns) * (_COLUMN + _GAP) - _GAP, 980)
    parts += [_header(name, explained), _legend(bottom + 10, explained)]
    height = bottom + 76
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}" role="img"><title>{escape(name)}</title>'
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def _header(name: str, explained: Explained) -> str:
    seconds, load, mesh = explained.total("seconds"), explained.load, explained.program.mesh
    step = (
        f"One step of {load.tokens} tokens a group, {load.context} tokens of context: {time(seconds)},"
        f" {share(explained)} of it between ranks. A rank holds {size(explained.total('held'))} of weights,"
        f" reads {size(explained.total('weights'))} of them and {size(explained.total('cache'))} of cache."
    )
    lines = [("t", name), ("n", f"Ranks: {ranks(mesh, explained.axes())}"), ("n", step)]
    lines.append(("s", f"Predicted from the stated rates of {explained.hardware.name}; not measured."))
    return "".join(_text(_MARGIN, 36 + 24 * at, line, kind) for at, (kind, line) in enumerate(lines))


def _height(section: Section) -> int:
    return 76 + _ROW * len(section.lines)


def _columns(sections: Sequence[Section]) -> list[list[Section]]:
    """Sections one below the other, in order, as long as the columns stay of about one height."""
    most = max(_height(section) for section in sections) + 260
    found: list[list[Section]] = [[]]
    for section in sections:
        if sum(map(_height, found[-1])) + _height(section) > most:
            found.append([])
        found[-1].append(section)
    return found


def _section(section: Section, x: int, y: int, slowest: float, explained: Explained) -> str:
    whole = section.times * section.seconds / explained.total("seconds")
    times = f"{section.times} x " if section.times > 1 else ""
    parts = [_text(x, y + 14, title(section)[0].upper() + title(section)[1:], "h")]
    parts.append(_text(x, y + 30, f"{times}{time(section.seconds)}, {100 * whole:.0f}% of the step", "s"))
    span = explained.program.mesh.attention_span
    for at, line in enumerate(section.lines):
        here = y + 44 + _ROW * at
        parts += [_stream(line, x, here, span, last=at + 1 == len(section.lines))]
        parts += [_boxed(line, x + _LANE, here, slowest)]
        if at + 1 < len(section.lines):
            middle = x + _LANE + _BOX // 2
            parts += [_line((middle, here + 34), (middle, here + _ROW), 1)]
    return "".join(parts)


def _stream(line: Line, x: int, y: int, span: int, *, last: bool) -> str:
    """The residual stream beside one row, and where it meets the activations."""
    if not line.stream:
        return ""
    dashes = "3 3" if line.stream < span else ""
    middle, bottom = y + 17, y + (34 if last else _ROW)
    lane = _line((x + 12, y), (x + 12, bottom), 2, dashes)
    if line.adds:
        lane += _line((x + 12, middle), (x + _LANE, middle), 2)
        lane += f'<circle cx="{x + 12}" cy="{middle}" r="8" fill="#fff" stroke="#5f6368" stroke-width="1.5"/>'
        lane += f'<path d="M{x + 8} {middle}h8M{x + 12} {y + 13}v8" stroke="#5f6368" stroke-width="1.5"/>'
    return lane


def _line(start: tuple[int, int], end: tuple[int, int], width: int, dashes: str = "") -> str:
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return (
        f'<line x1="{start[0]}" y1="{start[1]}" x2="{end[0]}" y2="{end[1]}" stroke="#9aa0a6"'
        f' stroke-width="{width}"{dashed}/>'
    )


def _boxed(line: Line, x: int, y: int, slowest: float) -> str:
    """A row: what it is, what it costs, and how long it takes beside the slowest."""
    if line.kind == "select":
        dashes = _line((x, y + 17), (x + _BOX, y + 17), 1, "2 4")
        back = f'<rect x="{x + 103}" y="{y + 8}" width="170" height="18" fill="#fff"/>'
        return dashes + back + _text(x + _BOX // 2, y + 21, line.what, "s", "middle")
    fill, edge = _WARM if line.axis is None else _COLORS[line.axis]
    radius, stroke = (17, 1) if line.axis is None else (5, 1)
    if line.kind == "local":
        fill, edge = "#ffffff", "#9aa0a6"
    if line.kind == "fused":
        fill, edge, stroke = _WARM[0], _WARM[1], 2
    name, cost = _words(line)
    box = (
        f'<rect x="{x}" y="{y}" width="{_BOX}" height="34" rx="{radius}" fill="{fill}" stroke="{edge}"'
        f' stroke-width="{stroke}"/>'
    )
    words = _text(x + 12, y + 15, name, "b" if line.kind in ("move", "fused") else "n")
    words += _text(x + 12, y + 28, cost, "s")
    bar = max(1.0, 60 * line.seconds / slowest) if line.seconds else 0.0
    beside = f'<rect x="{x + _BOX + 10}" y="{y + 20}" width="{bar:.1f}" height="6" rx="2" fill="{edge}"/>'
    return box + words + beside + _text(x + _BOX + 10, y + 14, time(line.seconds), "s")


def _words(line: Line) -> tuple[str, str]:
    cost = [line.lies.replace(" | ", " on ")]
    cost += [f"{line.ranks} ranks, {size(line.sent)}/token"] if line.ranks else []
    cost += [f"{size(line.weights)} weights"] if line.weights >= 1e5 else []
    cost += [f"{size(line.cache)} cache"] if line.cache else []
    step = line.step.rsplit(".", 1)[-1] if line.kind == "fused" else line.step
    name = f"{line.what}: {step}" if line.what and step else line.what or step
    if line.kind == "fused":
        name = line.what
        cost[0] = f"{step}: {cost[0]}"
    return name, " · ".join(cost)


def _legend(y: int, explained: Explained) -> str:
    shown = [
        ("attention", *_COLORS["attn"], "attn"),
        ("dense", *_COLORS["dense"], "dense"),
        ("experts", *_COLORS["moe"], "moe"),
        ("vocabulary", *_COLORS["vocab"], "vocab"),
        ("between ranks", *_WARM, ""),
    ]
    parts, x = [], _MARGIN
    for label, fill, edge, axis in shown:
        if axis and axis not in explained.axes():
            continue
        parts.append(
            f'<rect x="{x}" y="{y}" width="16" height="16" rx="4" fill="{fill}" stroke="{edge}"/>'
            + _text(x + 24, y + 13, label, "n")
        )
        x += 44 + 8 * len(label)
    notes = (
        "whole on 8: 8 ranks hold the same tokens, with all features; 1/4 on 8: with a quarter of them;"
        " sum of 4 on 8: one of 4 summands",
        "left line: the residual stream, dashed where the ranks of a group have shared out its tokens",
    )
    parts += [_text(_MARGIN, y + 36 + 16 * at, note, "s") for at, note in enumerate(notes)]
    return "".join(parts)


def _text(x: int, y: int, words: str, kind: str, anchor: str = "") -> str:
    placed = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x}" y="{y}" class="{kind}"{placed}>{escape(words)}</text>'
