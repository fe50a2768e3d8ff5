"""Declarations of what mixes tokens: attention over a cache, and linear attention with a state."""

from dataclasses import dataclass, replace

from quickturn.layers import attention, context, linear_attention
from quickturn.layers.rotary import Rotary
from quickturn.models.declare import Materials, NormKind, norm_weight
from quickturn.parallel.placement import Placed, PlacementError, Shard, Step
from quickturn.parallel.shards import Place
from quickturn.parallel.weights import Cut, Segment, WeightSpec


@dataclass(frozen=True)
class Attend:
    """Attention of decoder layer `layer` over its cache, heads shared out.

    `norms` names q and k norm modules, if any. `scale` multiplies the scores, by default 1 / sqrt(head_dim).
    `gated`: the input ends with a gate for each query head. `sinks` names a parameter with one logit for each
    query head. `softcap` squashes the scores, 0 for not. `part`, `parts`: which part, of how many, of each
    block's tokens the cache holds here.
    """

    name: str
    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary: Rotary
    window: int = 0
    norms: tuple[str, str] | None = None
    eps: float = 1e-6
    norm_kind: NormKind = "plain"
    scale: float | None = None
    gated: bool = False
    sinks: str = ""
    softcap: float = 0.0
    part: int = 0
    parts: int = 1

    @property
    def placed(self) -> Placed:
        """Axis and placements of the step."""
        return Placed(self.name, "attn", Shard(-1), Shard(-1), mixes=True)

    def weights(self) -> tuple[WeightSpec, ...]:
        """Norm weights `[D]`, the same for every head; sinks `[Hq]`."""
        norms = tuple(norm_weight(name, self.head_dim, "attn", self.norm_kind) for name in self.norms or ())
        if not self.sinks:
            return norms
        segments = (Segment(self.sinks, self.heads),)
        return *norms, WeightSpec(self.sinks, segments, None, "vector", "attn", Shard(0))

    def on(self, place: Place) -> "Attend":
        """The heads, and the tokens, that the rank at `place` holds. With fewer heads of keys and values than
        ranks, several ranks hold the same. Tokens in a window are few: every rank holds all of them. Raises
        PlacementError for heads that can't be shared out so.
        """
        ranks = place.part("attn")[1]
        if self.heads % ranks or (self.kv_heads % ranks and ranks % self.kv_heads):
            raise PlacementError(
                f"{self.name} has {self.heads} heads and {self.kv_heads} of keys and values, which {ranks}"
                " ranks can't share"
            )
        part, parts = (0, 1) if self.window else place.tokens()
        return replace(
            self,
            heads=self.heads // ranks,
            kv_heads=max(1, self.kv_heads // ranks),
            part=part,
            parts=parts,
        )

    def step(self, materials: Materials) -> Step:
        """Fused `q|k|v` or `q|k|v|gate` `[T, ...] -> [T, Hq D]`."""
        q_norm, k_norm = (
            (materials.tensor(f"{name}.weight") for name in self.norms) if self.norms else (None, None)
        )
        whole = attention.Attention(
            layer=self.layer,
            head_dim=self.head_dim,
            queries_per_kv=self.heads // self.kv_heads,
            scale=self.head_dim**-0.5 if self.scale is None else self.scale,
            cos_sin=materials.rotary[self.rotary],
            window=self.window,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=self.eps,
            gated=self.gated,
            sinks=materials.tensor(self.sinks) if self.sinks else None,
            softcap=self.softcap,
        )
        if self.parts == 1:
            return self.placed.step(whole)
        assert materials.gather is not None, self.name
        share = context.TokenShare(self.part, self.parts, materials.gather)
        return self.placed.step(context.SharedAttention(whole, share))


@dataclass(frozen=True)
class Delta:
    """The gated delta rule of decoder layer `layer` over its states, heads shared out.

    `module` holds `conv1d.weight`, `A_log`, `dt_bias` and `norm.weight` in the checkpoint. `width`: taps of
    the convolution.
    """

    name: str
    module: str
    layer: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int
    eps: float

    @property
    def channels(self) -> int:
        """What the convolution sees: all q, k and v."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def placed(self) -> Placed:
        """Axis and placements of the step."""
        return Placed(self.name, "attn", Shard(-1), Shard(-1), mixes=True)

    def weights(self) -> tuple[WeightSpec, ...]:
        """`conv1d.weight` `[C, W]`, q's channels first, then k's and v's; `A_log` and `dt_bias` `[Hv]` in
        float32; `norm.weight` `[Dv]`, the same for every head.
        """
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        per_key = self.value_heads // self.key_heads
        conv = f"{self.module}.conv1d.weight"
        parts = (
            (0, keys, self.key_dim),
            (keys, keys, self.key_dim),
            (2 * keys, values, self.value_dim * per_key),
        )
        segments = tuple(self._channels(conv, *part) for part in parts)
        of_heads = tuple(
            WeightSpec(
                f"{self.module}.{name}",
                (Segment(f"{self.module}.{name}", self.value_heads, per_key),),
                None,
                "vector",
                "attn",
                Shard(0),
                wide=True,
            )
            for name in ("A_log", "dt_bias")
        )
        return (
            WeightSpec(conv, segments, self.width, "table", "attn", Shard(0)),
            *of_heads,
            norm_weight(f"{self.module}.norm", self.value_dim, "attn"),
        )

    def on(self, place: Place) -> "Delta":
        """The heads that the rank at `place` holds. Raises PlacementError for heads that can't be shared out
        so.
        """
        ranks = place.part("attn")[1]
        if self.key_heads % ranks:
            raise PlacementError(
                f"{self.name} has {self.key_heads} key heads, which {ranks} ranks can't share"
            )
        return replace(self, key_heads=self.key_heads // ranks, value_heads=self.value_heads // ranks)

    def step(self, materials: Materials) -> Step:
        """`q|k|v|z|b|a` `[T, ...] -> [T, Hv Dv]`."""
        run = linear_attention.GatedDelta(
            layer=self.layer,
            values_per_key=self.value_heads // self.key_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            conv_weight=materials.tensor(f"{self.module}.conv1d.weight"),
            a_log=materials.tensor(f"{self.module}.A_log"),
            dt_bias=materials.tensor(f"{self.module}.dt_bias"),
            norm_weight=materials.tensor(f"{self.module}.norm.weight"),
            eps=self.eps,
        )
        return self.placed.step(run)

    def _channels(self, tensor: str, start: int, count: int, unit: int) -> Segment:
        shape = (self.channels, 1, self.width)
        at = ((start, start + count, 1), (0, 1, 1), (0, self.width, 1))
        return Segment(tensor, count, unit, Cut(shape, shape, at))
