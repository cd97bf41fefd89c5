"""KV layout of a model family: order of features, which are content and which rotary.

The KV of a chunk is one tensor [layers, tokens, features] in the model's dtype. Its features are the concatenated
segments of the family's layout, so the operator (`kvstore.operator.patch`) and the file format are written once for all
families (kamera.md §3, "One mechanism for MLA, GQA, and MHA"):

| family | segments |
|---|---|
| gqa (and MHA) | keys: heads x head_size, rotary; values: heads x head_size |
| mla | latent: 1 x latent; k_pe: 1 x rope width, rotary |
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvstore.errors import ShapeMismatch
from kvstore.operator.rotary import RotaryScheme


@dataclass(frozen=True)
class Segment:
    """Contiguous features treated alike: `heads` heads of `width` features, rotated or not."""

    name: str
    heads: int
    width: int
    rotary: bool

    def __post_init__(self) -> None:
        if self.heads < 1 or self.width < 1:
            raise ShapeMismatch(f"segment {self.name!r} needs positive heads and width")

    @property
    def features(self) -> int:
        return self.heads * self.width

    def share(self, ranks: int) -> Segment:
        """The part on one of `ranks` tensor-parallel ranks: whole heads, replicated if too few."""
        return replace(self, heads=max(1, self.heads // ranks))


@dataclass(frozen=True)
class Layout:
    """The features of one layer's KV, the same for every layer of the model."""

    family: str
    layers: int
    segments: tuple[Segment, ...]
    rotary: RotaryScheme

    def __post_init__(self) -> None:
        if self.layers < 1 or not self.segments:
            raise ShapeMismatch("a layout needs at least one layer and one segment")
        if len({segment.name for segment in self.segments}) != len(self.segments):
            raise ShapeMismatch("segment names must differ")
        for segment in self.segments:
            if segment.rotary and segment.width < self.rotary.rotary_dim:
                raise ShapeMismatch(f"segment {segment.name!r} is narrower than the rotary dimension")

    @classmethod
    def gqa(cls, layers: int, kv_heads: int, head_size: int, rotary: RotaryScheme) -> Layout:
        """Grouped-query or multi-head attention: full keys (rotary), then values."""
        keys = Segment("keys", kv_heads, head_size, rotary=True)
        return cls("gqa", layers, (keys, Segment("values", kv_heads, head_size, rotary=False)), rotary)

    @classmethod
    def mla(cls, layers: int, latent: int, k_pe: int, rotary: RotaryScheme) -> Layout:
        """Multi-head latent attention: the position-free latent, then the decoupled rotary key."""
        content = Segment("latent", 1, latent, rotary=False)
        return cls("mla", layers, (content, Segment("k_pe", 1, k_pe, rotary=True)), rotary)

    @cached_property
    def features(self) -> int:
        return sum(segment.features for segment in self.segments)

    @cached_property
    def of_one_layer(self) -> Layout:
        """The same features in one layer."""
        return replace(self, layers=1)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """KV bytes of one token over all layers."""
        return self.layers * self.features * dtype.itemsize

    def slices(self) -> dict[str, slice]:
        """Slice of each segment on the feature axis, in order."""
        places, start = {}, 0
        for segment in self.segments:
            places[segment.name] = slice(start, start + segment.features)
            start += segment.features
        return places

    def share(self, rank: int, ranks: int) -> Tensor:
        """Indices [local features] kept by tensor-parallel rank `rank` of `ranks`, as vLLM splits."""
        chosen = []
        for segment, place in zip(self.segments, self.slices().values(), strict=True):
            features = torch.arange(place.start, place.stop).view(segment.heads, segment.width)
            first = rank * segment.heads // ranks
            chosen.append(features[first : first + segment.share(ranks).heads].flatten())
        return torch.cat(chosen)

    def split(self, kv: Tensor) -> tuple[Tensor, ...]:
        """Views of the segments, each [..., features of the segment]."""
        return kv.split([segment.features for segment in self.segments], dim=-1)

    def check(self, kv: Tensor) -> None:
        """Raise ShapeMismatch unless kv is [layers, tokens, features] of this layout."""
        if kv.dim() != 3 or kv.shape[0] != self.layers or kv.shape[2] != self.features:
            expected = f"[{self.layers}, tokens, {self.features}]"
            raise ShapeMismatch(f"KV has shape {list(kv.shape)}, the {self.family} layout needs {expected}")

    def to_json(self) -> str:
        """Canonical JSON: equal layouts give equal text; fp64 frequencies survive exactly."""
        document = {
            "family": self.family,
            "layers": self.layers,
            "segments": [[s.name, s.heads, s.width, s.rotary] for s in self.segments],
            "rotary": {"style": self.rotary.style, "inverse_frequencies": list(self.rotary.inverse_frequencies)},
        }
        return json.dumps(document, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Inverse of `to_json`. Raises ShapeMismatch on text that does not describe a layout."""
        try:
            document: dict[str, Any] = json.loads(text)
            segments = tuple(Segment(str(n), int(h), int(w), bool(r)) for n, h, w, r in document["segments"])
            rotary = RotaryScheme(tuple(document["rotary"]["inverse_frequencies"]), document["rotary"]["style"])
            return cls(str(document["family"]), int(document["layers"]), segments, rotary)
        except (KeyError, TypeError, ValueError) as error:
            raise ShapeMismatch(f"not a layout: {error}") from error
