"""Factors in 8 bits, and ranks that differ by layer and segment: for every family, on both implementations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvstore_support import GQA, MLA, random_kv
from torch import Tensor

from kvstore.errors import ShapeMismatch
from kvstore.operator import host_kernel
from kvstore.operator.apply import apply, relocate, relocate_patch
from kvstore.operator.basis import pool_basis
from kvstore.operator.directions import Directions, joined
from kvstore.operator.layout import Layout
from kvstore.operator.patch import Patch, PatchKind, compose, form_patch, remainder
from kvstore.operator.rotary import RotaryScheme

WIDE = Layout.gqa(5, 4, 16, RotaryScheme.from_base(8, 1e6))  # rotates half of each head
families = pytest.mark.parametrize("layout", [GQA, MLA, WIDE], ids=["gqa", "mla", "partial rotary"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
TOKENS = 21  # no multiple of what the kernel takes at once
STEP = 1 / 254  # half a step of int8, relative to the largest element


def uneven(layout: Layout, tokens: int = TOKENS, seed: int = 1) -> Tensor:
    """A deficit that grows with depth and whose segments differ in size and in how fast their spectra fall."""
    delta = random_kv(layout, tokens, seed=seed) * torch.linspace(0.1, 2, layout.layers)[:, None, None]
    for index, part in enumerate(layout.split(delta)):
        part.mul_(torch.linspace(1, 0.02 + 0.5 * index, part.shape[2]) / (1 + index))
    return delta


def default(delta: Tensor, layout: Layout, rank: int, **form: object) -> Patch:
    return form_patch(delta, layout, rank, dtype=torch.int8, spread=True, **form)


def kept_in_all(patch: Patch, delta: Tensor) -> float:
    return 1 - float((patch.dense() - delta[patch.first_layer :]).square().sum() / delta.square().sum())


@families
@pytest.mark.parametrize("rank", [1, 4, None])
def test_rounding_to_8_bits_moves_no_direction_further_than_half_a_step(layout: Layout, rank: int | None) -> None:
    delta = uneven(layout)
    exact, rounded = (form_patch(delta, layout, rank, dtype=dtype) for dtype in (torch.float32, torch.int8))
    for before, after in zip(exact.segments, rounded.segments, strict=True):
        assert (after.left.dtype, after.right.dtype, after.scale.dtype) == (torch.int8, torch.int8, torch.float32)
        largest = before.scale * before.left.abs().amax(1) * before.right.abs().amax(1)
        bound = torch.zeros(layout.layers).index_add_(0, before.layer, largest * (2 * STEP + STEP**2))
        wrong = (after.dense() - before.dense()).abs().amax((1, 2))
        assert (wrong <= bound * 1.001 + 1e-6).all()
        assert wrong.max() > 0


@families
def test_what_8_bits_keep_is_what_the_patch_says(layout: Layout) -> None:
    delta = uneven(layout)
    patch = default(delta, layout, 3)
    for part, segment, energy in zip(patch.segments, layout.split(delta), patch.energy, strict=True):
        lost = (part.dense() - segment).square().sum() / segment.square().sum()
        assert energy == pytest.approx(1 - float(lost), abs=1e-6)


@families
@dtypes
@pytest.mark.parametrize("delta", [0, 37, -1200])
@pytest.mark.parametrize("form", [{"dtype": torch.int8}, {"spread": True}, {"dtype": torch.int8, "spread": True}])
def test_apply_is_the_sum_of_the_directions(
    layout: Layout, dtype: torch.dtype, delta: int, form: dict, implementation: str
) -> None:
    kv, patch = random_kv(layout, TOKENS, dtype), form_patch(uneven(layout), layout, 5, **form)
    expected = relocate(kv.float() + patch.dense(), delta, layout)
    result = apply(kv, patch, delta, layout)
    if dtype is torch.float32:
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    else:  # rounded once
        assert ((result.float() - expected).abs() <= expected.abs() * 2**-8 * 1.001 + 1e-5).all()
    for layer in range(layout.layers):
        alone = apply(kv[layer : layer + 1], patch.of_layer(layer), delta, layout.of_one_layer)
        torch.testing.assert_close(alone[0], result[layer], rtol=2**-7, atol=1e-5)


@families
@pytest.mark.parametrize("weighted", [False, True])
def test_a_patch_of_some_tokens_is_that_part_of_it(layout: Layout, weighted: bool, implementation: str) -> None:
    kv, patch = random_kv(layout, TOKENS), default(uneven(layout), layout, 3)
    if weighted:
        weights = torch.linspace(0, 1, layout.layers * TOKENS).view(layout.layers, TOKENS)
        patch = replace(patch, segments=tuple(part.weighted(weights) for part in patch.segments))
    whole, part = apply(kv, patch, 37, layout), apply(kv[:, 4:17], patch.of_tokens(4, 17), 37, layout)
    torch.testing.assert_close(part, whole[:, 4:17], rtol=1e-5, atol=1e-5)
    assert patch.of_tokens(0, TOKENS) is patch


@families
def test_the_kernel_takes_bytes_as_they_are_stored(layout: Layout, implementation: str, monkeypatch) -> None:
    if implementation == "torch":
        pytest.skip("about the kernel")
    taken: list[torch.dtype] = []
    loops = host_kernel._loops()
    monkeypatch.setattr(
        host_kernel, "_loops", lambda: lambda *a: taken.extend(x.dtype for x in a[5] + a[6]) or loops(*a)
    )
    apply(random_kv(layout, TOKENS), default(uneven(layout), layout, 3), 5, layout)
    assert {str(dtype) for dtype in taken} == {"int8"}


@families
@pytest.mark.parametrize("depth", [1.0, 0.5])
def test_large_kv_is_shared_between_threads_without_a_seam(layout: Layout, depth: float, implementation: str) -> None:
    kv, delta = random_kv(layout, 4001), uneven(layout, 4001)
    patch = default(delta, layout, 3, depth=depth)
    expected = kv.clone()
    expected[patch.first_layer :] += patch.dense()
    torch.testing.assert_close(apply(kv, patch, 0, layout), expected, rtol=1e-5, atol=1e-5)


@families
@settings(max_examples=25)
@given(rank=st.integers(1, 12), tokens=st.integers(2, 40), seed=st.integers(0, 99))
def test_rank_goes_where_it_keeps_most(layout: Layout, rank: int, tokens: int, seed: int) -> None:
    """As in a knapsack that is filled by value per weight: only what is too large for the rest of it is missing."""
    delta = uneven(layout, tokens, seed)
    even, spread = form_patch(delta, layout, rank), form_patch(delta, layout, rank, spread=True)
    assert spread.nbytes <= even.nbytes
    assert default(delta, layout, rank).nbytes <= form_patch(delta, layout, rank, dtype=torch.int8).nbytes
    assert spread.rank <= rank
    assert all(max(part.ranks) <= 2 * rank for part in spread.segments)
    prices = [part.nbytes / len(part.scale) for part in even.segments]
    gains = [(part.left.norm(dim=1) * part.right.norm(dim=1)).square() for part in spread.segments]
    least = min(float(gain.min()) / price for gain, price in zip(gains, prices, strict=True) if len(gain))
    missing = least * max(prices) / float(delta.square().sum())
    assert kept_in_all(spread, delta) >= kept_in_all(even, delta) - missing - 1e-5


def test_a_layer_without_a_deficit_gets_nothing_of_a_patch() -> None:
    delta = random_kv(WIDE, TOKENS)
    delta[1:4] = 0
    patch = default(delta, WIDE, 4)
    assert all(part.ranks[1:4] == (0, 0, 0) for part in patch.segments)
    kv = random_kv(WIDE, TOKENS)
    assert torch.equal(apply(kv, patch, 0, WIDE)[1:4], kv[1:4])
    nothing = default(torch.zeros_like(delta), WIDE, 4)
    assert torch.equal(apply(kv, nothing, 0, WIDE), kv)


@families
@pytest.mark.parametrize("energy", [0.5, 0.9, 0.99])
def test_energy_counts_over_all_layers_and_segments(layout: Layout, energy: float) -> None:
    delta = uneven(layout)
    patch = form_patch(delta, layout, energy=energy, spread=True)
    assert kept_in_all(patch, delta) >= energy - 1e-5
    last = min(float(part.left[stop - 1].norm() * part.right[stop - 1].norm()) ** 2
               for part in patch.segments for start, stop in zip(part.starts, part.starts[1:], strict=False)
               if stop > start)  # fmt: skip
    assert kept_in_all(patch, delta) - last / float(delta.square().sum()) < energy + 0.02
    even = form_patch(delta, layout, energy=energy)
    assert patch.nbytes <= even.nbytes * 1.05
    limited = form_patch(delta, layout, 2, energy=energy, spread=True)
    assert limited.nbytes <= form_patch(delta, layout, 2).nbytes


@families
def test_full_rank_is_exact_whether_spread_or_not(layout: Layout) -> None:
    delta = uneven(layout)
    assert torch.equal(form_patch(delta, layout, spread=True).dense(), form_patch(delta, layout).dense())
    torch.testing.assert_close(form_patch(delta, layout, spread=True).dense(), delta)
    kept = kept_in_all(form_patch(delta, layout, dtype=torch.int8, spread=True), delta)
    assert 1 - 1e-4 < kept < 1  # the one side that is no identity is rounded


@families
def test_sums_of_patches_of_any_precision_and_depth(layout: Layout) -> None:
    delta = [uneven(layout, seed=seed) for seed in range(3)]
    own = default(delta[0], layout, 4)
    deep = default(delta[1], layout, 3, depth=0.5)
    bf16 = form_patch(delta[2], layout, 2, dtype=torch.bfloat16)
    expected = 0.7 * (own.dense() + bf16.dense())
    expected[deep.first_layer :] += 0.7 * deep.dense()
    whole = compose([own, deep, bf16], 0.7)
    torch.testing.assert_close(whole.dense(), expected, rtol=1e-4, atol=1e-4)
    kv = random_kv(layout, TOKENS)
    torch.testing.assert_close(apply(kv, whole, 0, layout), kv + expected, rtol=1e-4, atol=1e-4)
    alike = compose([own, default(delta[2], layout, 2)], base=default(delta[1], layout, 1))
    assert {part.left.dtype for part in alike.segments} == {torch.int8}  # sums change scales only


@families
@dtypes
@pytest.mark.parametrize("rows", ["token", "layer and token"])
def test_a_sum_weighed_by_token_stays_in_8_bits(layout: Layout, dtype: torch.dtype, rows: str) -> None:
    parts = [default(uneven(layout, seed=seed), layout, 3 + seed) for seed in range(3)]
    shape = (1, TOKENS) if rows == "token" else (layout.layers, TOKENS)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.rand(shape, generator=generator) for _ in parts[1:]]
    weighed = [
        replace(part, segments=tuple(one.weighted(by) for one in part.segments))
        for part, by in zip(parts[1:], weights, strict=True)
    ]
    whole = compose([*weighed, parts[0]])
    expected = parts[0].dense() + sum(by[..., None] * part.dense() for part, by in zip(parts[1:], weights, strict=True))
    torch.testing.assert_close(whole.dense(), expected, rtol=1e-5, atol=1e-5)
    assert {part.left.dtype for part in whole.segments} == {torch.int8}
    kv = random_kv(layout, TOKENS, dtype)
    exact = relocate(kv.float() + expected, 5, layout)
    found = apply(kv, whole, 5, layout).float()
    rounded_once = exact.abs() * (2**-8 * 1.001 if dtype is torch.bfloat16 else 1e-5) + 1e-5
    assert ((found - exact).abs() <= rounded_once).all()
    for layer in range(layout.layers):
        torch.testing.assert_close(whole.of_layer(layer).dense()[0], expected[layer], rtol=1e-5, atol=1e-5)
    twice = replace(whole, segments=tuple(part.weighted(torch.full((1, TOKENS), 0.5)) for part in whole.segments))
    torch.testing.assert_close(twice.dense(), expected / 2, rtol=1e-5, atol=1e-5)
    again = replace(whole, segments=tuple(part.to(torch.float32) for part in whole.segments))
    torch.testing.assert_close(again.dense(), expected, rtol=1e-5, atol=1e-5)
    cut = whole.truncated(2)
    assert all(max(part.ranks) == 2 for part in cut.segments)
    torch.testing.assert_close(apply(kv.float(), cut, 0, layout) - kv.float(), cut.dense(), rtol=1e-4, atol=1e-4)


@families
def test_sums_of_8_bit_coefficients_of_a_shared_basis(layout: Layout) -> None:
    basis = pool_basis([default(uneven(layout, seed=seed), layout, 6) for seed in range(4)], 5)
    patches = [default(uneven(layout, seed=9 + i), layout, rank, basis=basis) for i, rank in enumerate((5, 2))]
    for patch, rank in zip(patches, (5, 2), strict=True):
        limits = [min(rank, part.shape[2]) for part in basis.directions]
        assert [part.ranks for part in patch.segments] == [(limit,) * layout.layers for limit in limits]
        assert {part.left.dtype for part in patch.unbound.segments} == {torch.int8}
        assert torch.equal(patch.unbound.bind(basis).dense(), patch.dense())
    summed = compose(patches, 0.5)
    assert summed.rank == 5
    torch.testing.assert_close(summed.dense(), 0.5 * (patches[0].dense() + patches[1].dense()), rtol=1e-4, atol=1e-4)


@families
def test_moving_an_8_bit_basis_equals_moving_the_sum(layout: Layout, implementation: str) -> None:
    kv, patch = random_kv(layout, TOKENS), default(uneven(layout), layout, 4)
    after = relocate(kv, 123, layout) + relocate_patch(patch, 123, layout).dense()
    torch.testing.assert_close(after, apply(kv, patch, 123, layout), rtol=1e-5, atol=1e-5)
    moved = apply(relocate(kv, 123, layout), relocate_patch(patch, 123, layout), 0, layout)
    torch.testing.assert_close(moved, apply(kv, patch, 123, layout), rtol=1e-5, atol=1e-5)


@families
def test_what_is_cut_from_a_spread_patch_is_what_is_left(layout: Layout) -> None:
    patch = default(uneven(layout), layout, 4)
    widest = max(max(part.ranks) for part in patch.segments)
    assert patch.truncated(widest) is patch
    narrow = patch.truncated(2)
    assert narrow.rank == 2
    for part, cut in zip(patch.segments, narrow.segments, strict=True):
        assert cut.ranks == tuple(min(rank, 2) for rank in part.ranks)
        for layer in range(layout.layers):
            (left, right), (less, other) = part.factors_of(layer), cut.factors_of(layer)
            assert torch.equal(left[:2], less)
            assert torch.equal(right[:2], other)
    deep = patch.from_depth(0.5)
    assert torch.equal(deep.dense(), patch.dense()[deep.first_layer :])


@families
def test_updates_and_removals_in_8_bits_leave_little(layout: Layout) -> None:
    before, now = uneven(layout, seed=1), uneven(layout, seed=2)
    stale = default(before, layout, 4)
    rest = remainder(now, stale)
    update = form_patch(rest, layout, dtype=torch.int8, kind=PatchKind.update)
    assert remainder(now, compose([stale, update])).norm() < 0.01 * now.norm()
    removal = form_patch(-now, layout, dtype=torch.int8, kind=PatchKind.removal)
    kv = random_kv(layout, TOKENS)
    left_over = apply(kv + now, removal, 0, layout) - kv
    assert left_over.norm() < 0.01 * now.norm()


def test_directions_that_do_not_add_up_are_refused() -> None:
    left, right, scale = torch.ones(3, 5), torch.ones(3, 8), torch.ones(3)
    Directions(left, right, scale, (2, 1))
    for wrong in [(left, right, scale, (2, 2)), (left[:2], right, scale, (2, 1)), (left, right, scale[:2], (2, 1)),
                  (left, right[None], scale, (2, 1))]:  # fmt: skip
        with pytest.raises(ShapeMismatch, match="are not"):
            Directions(*wrong)
    part = Directions(left, right, scale, (2, 1))
    assert joined([part, part]).ranks == (4, 2)
    with pytest.raises(ShapeMismatch, match="of 2 layers"):
        part.weighted(torch.ones(3, 5))
    with pytest.raises(ShapeMismatch, match="are not"):
        part.weighted(torch.ones(1, 4))
    with pytest.raises(ShapeMismatch, match="same tokens and layers"):
        Patch(PatchKind.own, 2, (part, Directions(torch.ones(3, 6), right, scale, (2, 1))), (1.0, 1.0))
    with pytest.raises(ShapeMismatch, match="shared basis"):
        Patch(PatchKind.own, 2, (Directions(left, None, scale, (2, 1)),), (1.0,))


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(exponent=st.integers(-20, 8), seed=st.integers(0, 99))
def test_no_size_of_numbers_is_lost(exponent: int, seed: int) -> None:
    delta = random_kv(GQA, 7, seed=seed) * 10.0**exponent
    patch = default(delta, GQA, 3)
    exact = form_patch(delta, GQA, 3, spread=True)
    assert float((patch.dense() - exact.dense()).norm()) < 0.02 * float(exact.dense().norm())
