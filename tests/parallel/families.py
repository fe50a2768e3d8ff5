"""Tiny models of every family that up to four ranks can share out, and every mesh of so many."""

from itertools import product
from pathlib import Path
from typing import Any

from tiny import OPTIONS, random_checkpoint

from quickturn.parallel.mesh import Mesh, make_mesh

ENOUGH: dict[str, Any] = {
    "num_experts": 8,
    "num_local_experts": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
"""Experts and heads for four ranks, where a family has them."""

EXPERTS = ("qwen3-moe", "qwen3-moe-mixed", "qwen3-next", "qwen3-next-dense", "qwen3.5-moe", "gpt-oss")


def write(option: str, directory: Path) -> None:
    """A checkpoint of the family."""
    family, options = OPTIONS[option]
    enough = {name: size for name, size in ENOUGH.items() if name in options}
    random_checkpoint(family, options | enough).save_pretrained(directory)


def meshes(option: str) -> list[Mesh]:
    """Every mesh of one, two and four ranks."""
    found = []
    for world in (1, 2, 4):
        sizes = [size for size in (1, 2, 4) if world % size == 0]
        for tp, dp, cp in product(sizes, sizes, sizes):
            if tp * dp * cp != world:
                continue
            for dense in sizes:
                for ep in sizes if option in EXPERTS else (1,):
                    found.append(make_mesh(tp=tp, dp=dp, cp=cp, dense_tp=dense, ep=ep))
    return found


def tolerance(option: str) -> float:
    """Of float32 logits around ten. States of the delta rule are sums over all tokens."""
    return 4e-3 if option.startswith(("qwen3-next", "qwen3.5")) else 3e-4
