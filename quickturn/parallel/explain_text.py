"""The explained program as text."""

from quickturn.parallel.explain import Explained, Line, Section
from quickturn.parallel.mesh import Mesh
from quickturn.parallel.placement import Axis

_COLUMNS = f"  {'':<66}{'lies':<14}{'stream':>6} {'sends/token':>12}{'weights':>10}{'cache':>10}{'time':>10}"


def text(name: str, explained: Explained) -> str:
    """The whole explanation, a line for each instruction; `name`: a line about the model."""
    load, mesh = explained.load, explained.program.mesh
    seconds, hardware = explained.total("seconds"), explained.hardware
    groups = f"in each of {mesh.dp} groups of requests" if mesh.dp > 1 else "in one group of requests"
    head = [
        name,
        f"ranks  {ranks(mesh, explained.axes())}",
        f"step   {plural(load.tokens, 'token')} {groups}, {load.samples} sampled, of"
        f" {plural(load.requests, 'request')} with {load.context} tokens of context",
        f"rates  {hardware.name}: memory {hardware.memory / 1e9:.0f} GB/s, compute"
        f" {hardware.compute / 1e12:.0f} TFLOP/s, {hardware.launch * 1e6:.1f} us a kernel, link"
        f" {hardware.link / 1e9:.0f} GB/s",
        "",
        _COLUMNS,
    ]
    for section in explained.sections:
        head += [title(section), *(_row(line) for line in section.lines), ""]
    emitted = load.samples * mesh.dp
    return "\n".join(
        [
            *head,
            f"one step  {time(seconds)}, {share(explained)} of it between ranks;"
            f" {1 / seconds:.0f} steps/s, {emitted / seconds:.0f} tokens/s in all",
            f"one rank  holds {size(explained.total('held'))} of weights, reads"
            f" {size(explained.total('weights'))} of them and {size(explained.total('cache'))} of cache,"
            f" sends {size(explained.total('sent'))} a token",
        ]
    )


def ranks(mesh: Mesh, axes: frozenset[Axis]) -> str:
    """How the ranks are shared out among the kinds of modules that there are."""
    if mesh.world == 1:
        return "1"
    found = [f"{mesh.world} ({mesh})", f"attention: heads over {mesh.tp}"]
    found[-1] += f", cache tokens over {mesh.cp}" if mesh.cp > 1 else ""
    found[-1] += f", requests over {mesh.dp}" if mesh.dp > 1 else ""
    if "dense" in axes:
        found.append(f"dense layers: inner features over {mesh.dense_tp}")
    if "moe" in axes:
        inner = f", inner features over {mesh.moe_tp}" if mesh.moe_tp > 1 else ""
        found.append(f"experts: whole ones over {mesh.ep}{inner}")
    return "; ".join(found)


def title(section: Section) -> str:
    """Which layers a section is."""
    if not section.layers:
        return "embedding" if section.lines[0].step.endswith("embed_tokens") else "head"
    if len(section.layers) == 1:
        return f"layer {section.layers[0]}"
    return f"layers {_numbers(section.layers)} ({len(section.layers)} alike)"


def _numbers(layers: tuple[int, ...]) -> str:
    """Runs of neighbours as `first-last`, up to three of them."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ", ".join(shown if len(shown) <= 4 else [*shown[:3], "...", shown[-1]])


def _row(line: Line) -> str:
    if line.kind == "select":
        return f"  -- {line.what}"
    over = f" over {line.ranks}" if line.ranks else ""
    what = f"{line.what}{over}" if line.what else f"{line.step}{', merged' + over if over else ''}"
    if line.what and line.step:
        what += f": {line.step}"
    mark = {"move": "> ", "local": "> ", "fused": "> ", "dispatch": "> "}.get(line.kind, "  ")
    cells = [size(value) if value else "" for value in (line.sent, line.weights, line.cache)]
    where = f"{line.lies:<14}{line.stream or '':>6} "
    costs = f"{cells[0]:>12}{cells[1]:>10}{cells[2]:>10}{time(line.seconds):>10}"
    return f"  {mark}{what:<64}{where}{costs}"


def share(explained: Explained) -> str:
    """Of a step's time, what passes between ranks."""
    return f"{100 * explained.between / explained.total('seconds'):.0f}%"


def plural(count: int, word: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count} {word}{'' if count == 1 else 's'}"


def size(value: float) -> str:
    """Bytes, to three digits."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= 0.9995 * scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} B"


def time(seconds: float) -> str:
    """Seconds, to three digits."""
    if seconds == 0:
        return "0"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
