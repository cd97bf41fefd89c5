"""The operator's algebra, on every family and on both of its implementations."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kvstore_support import GQA, MLA, random_kv
from torch import Tensor

from kvstore.errors import ShapeMismatch
from kvstore.operator.apply import apply, deficit_at, relocate, relocate_patch
from kvstore.operator.directions import Directions
from kvstore.operator.layout import Layout
from kvstore.operator.patch import Patch, PatchKind, compose, deficit, form_patch, mean_deficit
from kvstore.operator.rotary import RotaryScheme
from kvstore.operator.svd import factor

WIDE = Layout.gqa(2, 4, 32, RotaryScheme.from_base(16, 1e6))  # rotates half of each head
LAYOUTS = [GQA, MLA, WIDE]
pytestmark = pytest.mark.usefixtures("implementation")  # every test runs on both
names = pytest.mark.parametrize("layout", LAYOUTS, ids=["gqa", "mla", "partial rotary"])


def one_by_one(part: Directions) -> Tensor:
    """The sum of a segment's directions [layers, tokens, features] in fp64."""
    outer = torch.einsum("d,dt,df->dtf", part.scale.double(), part.left.double(), part.right.double())
    rows = iter(outer)
    zero = torch.zeros(part.tokens, part.features, dtype=torch.float64)
    return torch.stack([sum((next(rows) for _ in range(count)), zero) for count in part.ranks])


def exact(kv: Tensor, patch: Patch | None, delta: int, layout: Layout) -> Tensor:
    """R(delta) (KV + U Vᵀ) in fp64, one complex multiplication per pair: shares no code with the operator."""
    total = kv.double()
    if patch is not None:
        total[patch.first_layer :] += torch.cat([one_by_one(part) for part in patch.segments], -1)
    angles = torch.tensor(layout.rotary.inverse_frequencies, dtype=torch.float64) * delta
    turn, dim = torch.polar(torch.ones_like(angles), angles), layout.rotary.rotary_dim
    for segment, place in zip(layout.segments, layout.slices().values(), strict=True):
        if segment.rotary:
            heads = total[..., place].unflatten(-1, (segment.heads, segment.width))
            neox = layout.rotary.style == "neox"
            first = heads[..., : dim // 2] if neox else heads[..., 0:dim:2]
            second = heads[..., dim // 2 : dim] if neox else heads[..., 1:dim:2]
            turned = torch.complex(first, second) * turn
            first.copy_(turned.real)
            second.copy_(turned.imag)
    return total


def low_rank(layout: Layout, tokens: int, rank: int, seed: int = 1) -> Tensor:
    """A deficit of exactly this rank in every layer and segment."""
    parts = []
    for index, segment in enumerate(layout.segments):
        g = torch.Generator().manual_seed(seed + index)
        u = torch.randn(layout.layers, tokens, rank, generator=g)
        parts.append(u @ torch.randn(layout.layers, rank, segment.features, generator=g))
    return torch.cat(parts, -1)


@names
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_patch_of_full_rank_reproduces_conditioned_kv(layout: Layout, tokens: int) -> None:
    canonical, conditioned = random_kv(layout, tokens), random_kv(layout, tokens, seed=1)
    patch = form_patch(deficit(conditioned, canonical), layout)
    assert patch.energy == (1.0,) * len(layout.segments)
    torch.testing.assert_close(apply(canonical, patch, 0, layout), conditioned, rtol=1e-5, atol=1e-5)


@names
def test_a_deficit_is_not_rounded_on_its_way_to_the_canonical_frame(layout: Layout) -> None:
    canonical, conditioned = (random_kv(layout, 40, seed=seed).bfloat16() for seed in (0, 1))
    before = conditioned.clone()
    found = deficit_at(conditioned, canonical, 777, layout)
    assert torch.equal(conditioned, before), "the pages' KV is left as it was"
    truth = (exact(conditioned, None, -777, layout) - canonical.double()).float()
    torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-5)
    rounded = deficit(relocate(conditioned, -777, layout), canonical)
    assert (rounded - truth).norm() > 100 * (found - truth).norm()


@names
@pytest.mark.parametrize("tokens", [7, 40])
def test_one_less_than_full_rank_of_a_deficient_matrix_is_exact_too(layout: Layout, tokens: int) -> None:
    smallest = min(tokens, *(segment.features for segment in layout.segments))
    delta = low_rank(layout, tokens, smallest - 1)
    patch = form_patch(delta, layout, smallest - 1)
    torch.testing.assert_close(patch.dense(), delta, rtol=1e-5, atol=1e-4)


@names
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("delta", [0, 5, -1200])
@pytest.mark.parametrize("rank", [None, 1, 3, 8, 11])
def test_apply_equals_the_formula(layout: Layout, dtype: torch.dtype, delta: int, rank: int | None) -> None:
    kv = random_kv(layout, 9, dtype)
    patch = None if rank is None else form_patch(random_kv(layout, 9, seed=3), layout, rank)
    result = apply(kv, patch, delta, layout)
    expected = exact(kv, patch, delta, layout)
    assert result.dtype == dtype
    if dtype is torch.float32:
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)
    else:  # rounded once: at most half a unit in the last place, and the rounding of a sum done in fp32
        error = (result.double() - expected).abs()
        assert (error <= expected.abs() * 2**-8 * 1.0001 + 1e-6).all()


@names
def test_relocation_leaves_content_and_moves_keys(layout: Layout) -> None:
    kv = random_kv(layout, 6, torch.bfloat16)
    moved = relocate(kv, 19, layout)
    for segment, before, after in zip(layout.segments, layout.split(kv), layout.split(moved), strict=True):
        assert torch.equal(before, after) != segment.rotary


@names
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(a=st.integers(-50_000, 50_000), b=st.integers(-50_000, 50_000))
def test_relocations_compose(layout: Layout, a: int, b: int) -> None:
    kv = random_kv(layout, 3)
    there = relocate(relocate(kv, a, layout), b, layout)
    torch.testing.assert_close(there, relocate(kv, a + b, layout), rtol=1e-5, atol=1e-5)


@names
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_to_do_keeps_every_bit(layout: Layout, dtype: torch.dtype) -> None:
    kv = random_kv(layout, 4, dtype)
    kv[0, 0, 0] = -0.0
    same = apply(kv, None, 0, layout)
    assert torch.equal(same.view(torch.uint8), kv.view(torch.uint8))
    assert same.data_ptr() != kv.data_ptr()
    assert apply(kv, None, 0, layout, out=kv) is kv


@names
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_place_and_strided_out_equal_the_copy(layout: Layout, dtype: torch.dtype) -> None:
    kv = random_kv(layout, 9, dtype)
    patch = form_patch(random_kv(layout, 9, seed=3), layout, 4)
    expected = apply(kv, patch, 31, layout)
    rows = torch.zeros(9, layout.layers, layout.features + 5, dtype=dtype)[..., 5:].transpose(0, 1)
    columns = torch.zeros(layout.layers, 9, 2 * layout.features, dtype=dtype)[..., ::2]
    strided_kv = torch.zeros(9, layout.layers, layout.features, dtype=dtype).transpose(0, 1).copy_(kv)
    for out in (rows, columns):
        assert apply(strided_kv, patch, 31, layout, out=out) is out
        torch.testing.assert_close(out, expected, rtol=1e-6 if dtype is torch.float32 else 2**-7, atol=1e-6)
    assert torch.equal(apply(kv, patch, 31, layout, out=kv), expected)


def test_writing_into_rows_leaves_their_neighbours_alone() -> None:
    memory = torch.full((GQA.layers, 9, GQA.features + 6), 7.0)
    apply(random_kv(GQA, 9), None, 31, GQA, out=memory[..., 3:-3])
    assert (memory[..., :3] == 7).all()
    assert (memory[..., -3:] == 7).all()


@names
def test_moving_the_basis_equals_moving_the_sum(layout: Layout) -> None:
    kv, patch = random_kv(layout, 9), form_patch(random_kv(layout, 9, seed=3), layout, 4)
    after = relocate(kv, 123, layout) + relocate_patch(patch, 123, layout).dense()
    torch.testing.assert_close(after, apply(kv, patch, 123, layout), rtol=1e-5, atol=1e-5)


@names
@pytest.mark.parametrize("tokens", [6, 200])
def test_more_rank_never_means_more_error(layout: Layout, tokens: int) -> None:
    delta = random_kv(layout, tokens)
    errors, energies = [], []
    for rank in (1, 2, 3, 4, 5, 6):
        patch = form_patch(delta, layout, rank)
        errors.append((patch.dense() - delta).norm().item())
        energies.append(patch.energy)
    assert errors == sorted(errors, reverse=True)
    assert energies == sorted(energies)


@names
@pytest.mark.parametrize(("tokens", "rank"), [(5, 2), (200, 2), (200, 5)])
def test_truncation_is_as_good_as_the_svd(layout: Layout, tokens: int, rank: int) -> None:
    delta = random_kv(layout, tokens) * torch.linspace(1, 0.05, layout.features)
    patch = form_patch(delta, layout, rank)
    for index, segment in enumerate(layout.split(delta)):
        singular = torch.linalg.svdvals(segment.double())
        best = singular[:, :rank].square().sum() / singular.square().sum()
        assert patch.energy[index] == pytest.approx(best.item(), rel=0.02)  # noise: the worst case for iteration
        error = (patch.segments[index].dense() - segment).square().sum() / segment.square().sum()
        assert 1 - patch.energy[index] == pytest.approx(error.item(), rel=1e-3)


def test_wide_deficit_takes_the_krylov_path_and_stays_accurate() -> None:
    layout = Layout.gqa(2, 2, 64, RotaryScheme.from_base(64))  # 128 features, rank 8: a sixteenth
    delta = low_rank(layout, 300, 8) + 0.01 * random_kv(layout, 300)
    patch = form_patch(delta, layout, 8)
    for index, segment in enumerate(layout.split(delta)):
        singular = torch.linalg.svdvals(segment.double()).square()
        assert patch.energy[index] == pytest.approx((singular[:, :8].sum() / singular.sum()).item(), abs=1e-5)
    assert torch.equal(patch.dense(), form_patch(delta, layout, 8).dense())  # the same deficit, the same patch


@pytest.mark.parametrize("features", [48, 512], ids=["gram", "krylov"])
def test_where_fp32_eigenvectors_do_not_converge_fp64_finds_them(
    features: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(5)
    delta = torch.randn(2, 600, 3, generator=generator) @ torch.randn(2, 3, features, generator=generator)
    wanted = factor(delta, 8)
    found = torch.linalg.eigh

    def gives_up(symmetric: Tensor) -> object:
        if symmetric.dtype == torch.float32:
            raise torch.linalg.LinAlgError("the algorithm failed to converge")
        return found(symmetric)

    monkeypatch.setattr(torch.linalg, "eigh", gives_up)
    left, right, energy, _ = factor(delta, 8)
    assert (left.dtype, right.dtype) == (torch.float32, torch.float32)
    assert energy == pytest.approx(wanted.energy, abs=1e-5)
    torch.testing.assert_close(left @ right.mT, delta, rtol=1e-3, atol=1e-3)


@names
def test_energy_chooses_the_smallest_sufficient_rank(layout: Layout) -> None:
    delta = random_kv(layout, 12) * torch.linspace(1, 0.01, layout.features)
    patch = form_patch(delta, layout, energy=0.8)
    assert all(kept >= 0.8 for kept in patch.energy)
    for index, part in enumerate(patch.segments):
        if part.ranks[0] > 1:
            assert form_patch(delta, layout, part.ranks[0] - 1).energy[index] < 0.8
    assert form_patch(delta, layout, rank=2, energy=0.999).rank == 2


@names
def test_rank_is_capped_by_what_the_segment_has(layout: Layout) -> None:
    patch = form_patch(random_kv(layout, 5), layout, 1000)
    assert patch.rank == 5
    assert [part.ranks for part in patch.segments] == [(5,) * layout.layers] * len(layout.segments)


@names
def test_no_deficit_makes_a_patch_that_changes_nothing(layout: Layout) -> None:
    kv = random_kv(layout, 9)
    patch = form_patch(torch.zeros_like(kv), layout, 2)
    assert patch.energy == (1.0,) * len(layout.segments)
    assert torch.equal(apply(kv, patch, 0, layout), kv)


@names
def test_bf16_factors_cost_little_accuracy(layout: Layout) -> None:
    delta = low_rank(layout, 9, 2)
    patch = form_patch(delta, layout, 2, dtype=torch.bfloat16)
    assert {part.left.dtype for part in patch.segments} == {torch.bfloat16}
    scales = sum(part.scale.nbytes for part in patch.segments)
    assert (patch.nbytes - scales) * 2 == form_patch(delta, layout, 2).nbytes - scales
    result = apply(torch.zeros_like(delta), patch, 0, layout)
    assert (result - delta).norm() < 0.01 * delta.norm()


@names
def test_orbit_patch_is_formed_from_the_mean_over_orderings(layout: Layout) -> None:
    deltas = [random_kv(layout, 9, seed=seed) for seed in range(6)]
    mean = mean_deficit(deltas)
    torch.testing.assert_close(mean, torch.stack(deltas).mean(0))
    assert mean_deficit([d.bfloat16() for d in deltas]).dtype == torch.float32
    for ordering in itertools.islice(itertools.permutations(deltas), 3):
        torch.testing.assert_close(mean_deficit(ordering), mean)
    assert torch.equal(deltas[0], random_kv(layout, 9, seed=0))


@names
def test_composed_patch_is_the_scaled_sum(layout: Layout) -> None:
    patches = [form_patch(random_kv(layout, 9, seed=seed), layout, rank) for seed, rank in ((1, 2), (2, 3))]
    composed = compose(patches, scale=0.7)
    assert composed.kind is PatchKind.composed
    assert composed.rank == 5
    torch.testing.assert_close(composed.dense(), 0.7 * (patches[0].dense() + patches[1].dense()), rtol=1e-5, atol=1e-5)


@names
def test_deep_patch_covers_the_deepest_half_only(layout: Layout) -> None:
    kv, delta = random_kv(layout, 9), random_kv(layout, 9, seed=1)
    own, deep = form_patch(delta, layout), form_patch(delta, layout, depth=0.5)
    half = layout.layers // 2
    assert deep.first_layer == half
    assert deep.nbytes < own.nbytes
    patched = apply(kv, deep, 4, layout)
    assert torch.equal(patched[:half], relocate(kv, 4, layout)[:half])
    assert torch.equal(patched[half:], apply(kv, own, 4, layout)[half:])


@names
def test_deep_and_own_patches_compose(layout: Layout) -> None:
    own = form_patch(random_kv(layout, 9, seed=1), layout, 2)
    deep = form_patch(random_kv(layout, 9, seed=2), layout, 2, depth=0.5)
    expected = own.dense()
    expected[deep.first_layer :] += deep.dense()
    torch.testing.assert_close(compose([deep, own]).dense(), expected, rtol=1e-5, atol=1e-5)


def test_not_a_number_stays_not_a_number_in_bf16() -> None:
    kv = random_kv(GQA, 4, torch.bfloat16)
    kv[0, 1, 20] = float("nan")
    kv[0, 1, 21] = float("inf")
    moved = relocate(kv, 3, GQA)
    assert moved[0, 1, 20].isnan()
    assert moved[0, 1, 21] == float("inf")
    assert moved.isnan().sum() == 1


def test_halves_are_rounded_to_even_in_bf16() -> None:
    step = 2.0**-7  # of bf16 between 1 and 2
    kv = torch.ones(GQA.layers, 1, GQA.features)
    kv[..., 1::2] += step
    patch = form_patch(torch.full_like(kv, step / 2), GQA)
    expected = torch.ones_like(kv)
    expected[..., 1::2] += 2 * step
    assert torch.equal(apply(kv.bfloat16(), patch, 0, GQA).float(), expected)


def test_shapes_that_do_not_fit_are_refused() -> None:
    kv, patch = random_kv(GQA, 5), form_patch(random_kv(GQA, 5), GQA, 2)
    with pytest.raises(ShapeMismatch):
        apply(random_kv(GQA, 6), patch, 0, GQA)
    with pytest.raises(ShapeMismatch):
        apply(random_kv(MLA, 5), patch, 0, MLA)
    with pytest.raises(ShapeMismatch):
        apply(kv, patch, 0, GQA, out=torch.empty(1))
    with pytest.raises(ShapeMismatch):
        apply(kv, patch, 0, GQA, out=torch.empty_like(kv, dtype=torch.bfloat16))
    with pytest.raises(ShapeMismatch):
        deficit(kv, kv[:, :3])
    with pytest.raises(ShapeMismatch):
        form_patch(kv, GQA, 0)
    with pytest.raises(ShapeMismatch):
        form_patch(kv, GQA, energy=1.5)
    with pytest.raises(ShapeMismatch):
        mean_deficit([])
    with pytest.raises(ShapeMismatch):
        compose([])


def test_large_kv_is_shared_between_threads_without_a_seam() -> None:
    layout = Layout.gqa(3, 4, 64, RotaryScheme.from_base(64))
    kv, patch = random_kv(layout, 401), form_patch(random_kv(layout, 401, seed=1), layout, 4)
    torch.testing.assert_close(apply(kv, patch, 9, layout).double(), exact(kv, patch, 9, layout), rtol=1e-5, atol=1e-5)
