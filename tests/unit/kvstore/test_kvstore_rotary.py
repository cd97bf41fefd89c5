from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ShapeMismatch
from kvstore.operator.rotary import RotaryScheme, RotaryStyle, rotate

STYLES: tuple[RotaryStyle, ...] = ("neox", "interleaved")
deltas = st.integers(-100_000, 100_000)


def vectors(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60)
@given(a=deltas, b=deltas, style=st.sampled_from(STYLES), half=st.integers(1, 32), seed=st.integers(0, 99))
def test_rotations_compose(a: int, b: int, style: RotaryStyle, half: int, seed: int) -> None:
    scheme = RotaryScheme.from_base(2 * half, 1e6, style)
    x = vectors(seed, 3, 2 * half)
    twice = rotate(rotate(x, a, scheme), b, scheme)
    torch.testing.assert_close(twice, rotate(x, a + b, scheme), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("style", STYLES)
def test_rotation_matches_complex_multiplication(style: RotaryStyle) -> None:
    scheme = RotaryScheme.from_base(16, 1e4, style)
    x = vectors(1, 5, 16)
    angles = 1234.0 * torch.tensor(scheme.inverse_frequencies, dtype=torch.float64)
    turn = torch.polar(torch.ones_like(angles), angles)
    real, imaginary = (x[:, :8], x[:, 8:]) if style == "neox" else (x[:, ::2], x[:, 1::2])
    turned = torch.complex(real.double(), imaginary.double()) * turn
    parts = [turned.real, turned.imag]
    expected = torch.cat(parts, -1) if style == "neox" else torch.stack(parts, -1).flatten(-2)
    torch.testing.assert_close(rotate(x, 1234, scheme).double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("style", STYLES)
def test_zero_distance_keeps_every_bit(dtype: torch.dtype, style: RotaryStyle) -> None:
    x = vectors(2, 4, 3, 16).to(dtype)
    x[0, 0, 0] = -0.0
    rotated = rotate(x, 0, RotaryScheme.from_base(16, style=style))
    assert torch.equal(rotated.view(torch.uint8), x.view(torch.uint8))
    assert rotated.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("style", STYLES)
def test_features_beyond_the_rotary_dimension_pass_unchanged(style: RotaryStyle) -> None:
    scheme = RotaryScheme.from_base(8, style=style)
    x = vectors(3, 6, 20)
    rotated = rotate(x, 77, scheme)
    assert torch.equal(rotated[:, 8:], x[:, 8:])
    assert torch.equal(rotated[:, :8], rotate(x[:, :8], 77, scheme))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("style", STYLES)
def test_in_place_and_out_equal_the_copy(dtype: torch.dtype, style: RotaryStyle) -> None:
    scheme = RotaryScheme.from_base(8, style=style)
    x = vectors(4, 6, 12).to(dtype)
    expected = rotate(x, -31, scheme)
    out = torch.full((6, 24), 9.0, dtype=dtype)[:, ::2]
    assert rotate(x, -31, scheme, out=out) is out
    assert torch.equal(out, expected)
    assert torch.equal(rotate(x, -31, scheme, out=x), expected)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("style", STYLES)
def test_bf16_is_rounded_once(style: RotaryStyle) -> None:
    scheme = RotaryScheme.from_base(16, style=style)
    x = vectors(5, 50, 16).bfloat16()
    assert torch.equal(rotate(x, 999, scheme), rotate(x.float(), 999, scheme).bfloat16())


def test_angles_are_exact_at_large_distances() -> None:
    scheme = RotaryScheme((1.0,))
    cos, sin = scheme.rotation(99_999, "cpu")
    expected = torch.tensor([99_999.0], dtype=torch.float64)
    torch.testing.assert_close(cos.double(), expected.cos(), rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(sin.double(), expected.sin(), rtol=1e-7, atol=1e-7)


def test_a_head_narrower_than_the_rotary_dimension_is_refused() -> None:
    with pytest.raises(ShapeMismatch):
        rotate(torch.zeros(2, 6), 1, RotaryScheme.from_base(8))


def test_a_scheme_without_frequencies_or_of_unknown_style_is_refused() -> None:
    with pytest.raises(ShapeMismatch):
        RotaryScheme(())
    with pytest.raises(ShapeMismatch):
        RotaryScheme((1.0,), "spiral")  # type: ignore[arg-type]
