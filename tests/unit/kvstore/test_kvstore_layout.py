from __future__ import annotations

import json

import pytest
import torch

from kvstore.errors import ShapeMismatch
from kvstore.operator.layout import Layout, Segment
from kvstore.operator.rotary import RotaryScheme

ROTARY = RotaryScheme.from_base(128, 1e6)


def test_gqa_features_are_keys_then_values() -> None:
    layout = Layout.gqa(16, 2, 128, ROTARY)
    assert layout.features == 512
    assert layout.slices() == {"keys": slice(0, 256), "values": slice(256, 512)}
    assert [segment.rotary for segment in layout.segments] == [True, False]
    assert layout.bytes_per_token(torch.bfloat16) == 16 * 512 * 2


def test_mla_features_are_latent_then_rotary_key() -> None:
    layout = Layout.mla(27, 512, 64, RotaryScheme.from_base(64, style="interleaved"))
    assert layout.slices() == {"latent": slice(0, 512), "k_pe": slice(512, 576)}
    assert [segment.rotary for segment in layout.segments] == [False, True]
    assert layout.bytes_per_token(torch.float32) == 27 * 576 * 4


def test_split_gives_views_in_order() -> None:
    layout = Layout.gqa(1, 2, 128, ROTARY)
    kv = torch.arange(512.0).expand(1, 3, 512)
    keys, values = layout.split(kv)
    assert keys[0, 0, 0] == 0
    assert values[0, 0, 0] == 256
    assert keys.data_ptr() == kv.data_ptr()


@pytest.mark.parametrize(
    "layout", [Layout.gqa(16, 2, 128, ROTARY), Layout.mla(3, 512, 64, RotaryScheme((1.0, 1 / 3), "interleaved"))]
)
def test_json_round_trip_is_exact(layout: Layout) -> None:
    assert Layout.from_json(layout.to_json()) == layout
    assert Layout.from_json(layout.to_json()).to_json() == layout.to_json()


@pytest.mark.parametrize("damage", ["[]", "{}", "nonsense", '{"family": "gqa", "layers": 1}'])
def test_text_that_is_no_layout_is_refused(damage: str) -> None:
    with pytest.raises(ShapeMismatch):
        Layout.from_json(damage)


def test_json_with_an_impossible_layout_is_refused() -> None:
    document = json.loads(Layout.gqa(1, 1, 128, ROTARY).to_json())
    document["segments"][0][2] = 64  # narrower than the rotary dimension
    with pytest.raises(ShapeMismatch):
        Layout.from_json(json.dumps(document))


@pytest.mark.parametrize("shape", [(16, 3, 511), (15, 3, 512), (3, 512), (1, 16, 3, 512)])
def test_kv_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeMismatch):
        Layout.gqa(16, 2, 128, ROTARY).check(torch.empty(shape))


def test_segments_need_distinct_names_and_positive_sizes() -> None:
    twice = (Segment("keys", 1, 8, rotary=False),) * 2
    with pytest.raises(ShapeMismatch):
        Layout("gqa", 1, twice, ROTARY)
    with pytest.raises(ShapeMismatch):
        Segment("keys", 0, 8, rotary=True)
    with pytest.raises(ShapeMismatch):
        Layout.gqa(0, 2, 128, ROTARY)
