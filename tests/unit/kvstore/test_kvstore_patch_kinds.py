"""Which deficit a patch comes from, and how much of it is kept: every kind and form, for every family."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvstore_support import GQA, MLA, random_kv
from torch import Tensor

from kvstore.errors import ShapeMismatch
from kvstore.operator import host_kernel
from kvstore.operator.apply import apply, warm_up
from kvstore.operator.basis import SharedBasis, pool_basis
from kvstore.operator.layout import Layout
from kvstore.operator.patch import (
    ORBIT_ORDERINGS,
    Patch,
    PatchKind,
    compose,
    deficit,
    first_patched_layer,
    form_patch,
    mean_deficit,
    orderings,
    remainder,
)
from kvstore.operator.rotary import RotaryScheme
from kvstore.records.keys import patch_key
from kvstore.records.patch_form import PatchForm
from kvstore.settings import FactorType

MHA = Layout.gqa(5, 4, 8, RotaryScheme.from_base(8, 1e6))
LAYOUTS = [GQA, MLA, MHA]
families = pytest.mark.parametrize("layout", LAYOUTS, ids=["gqa", "mla", "mha"])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
TOKENS = 9


def pooled(layout: Layout, rank: int, depth: float = 1.0, patches: int = 6) -> SharedBasis:
    formed = [form_patch(random_kv(layout, 20, seed=50 + i), layout, depth=depth) for i in range(patches)]
    return pool_basis(formed, rank)


def full(layout: Layout) -> int:
    return max(segment.features for segment in layout.segments)


def error(patch: Patch, delta: Tensor) -> float:
    return float((patch.dense() - delta[patch.first_layer :]).norm() / delta[patch.first_layer :].norm())


@families
@dtypes
def test_full_rank_of_every_kind_gives_the_conditioned_kv(layout: Layout, dtype: torch.dtype) -> None:
    """bf16: to the rounding of the factors, which are stored in the KV's dtype."""
    canonical = random_kv(layout, TOKENS, dtype)
    behind = {name: random_kv(layout, TOKENS, dtype, seed=i + 1) for i, name in enumerate(("A", "A'", "S"))}
    delta = {name: deficit(kv, canonical) for name, kv in behind.items()}
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 3e-2, "atol": 6e-2}

    def formed(delta: Tensor, kind: PatchKind) -> Patch:
        return form_patch(delta, layout, kind=kind, dtype=dtype)

    stale = form_patch(delta["A"], layout, 2, dtype=dtype)
    basis = pooled(layout, full(layout))
    updated = compose([stale, formed(remainder(delta["A'"], stale), PatchKind.update)])
    arrivals = [
        (canonical, formed(delta["A"], PatchKind.own), "A"),
        (canonical, formed(mean_deficit([delta["A"], delta["A"]]), PatchKind.orbit), "A"),
        (canonical, formed(delta["A"], PatchKind.pair), "A"),
        (canonical, form_patch(delta["A"], layout, dtype=dtype, basis=basis), "A"),
        (canonical, updated, "A'"),
        (behind["A"], formed(deficit(behind["S"], behind["A"]), PatchKind.removal), "S"),
    ]
    for start, patch, goal in arrivals:
        torch.testing.assert_close(apply(start, patch, 0, layout), behind[goal], **tolerance)


@families
@settings(max_examples=15)
@given(tokens=st.integers(2, 40), seed=st.integers(0, 1000), shared=st.booleans(), depth=st.sampled_from([1.0, 0.5]))
def test_error_falls_with_rank_in_every_form(
    layout: Layout, tokens: int, seed: int, shared: bool, depth: float
) -> None:
    delta = random_kv(layout, tokens, seed=seed)
    basis = pooled(layout, full(layout)) if shared else None
    patches = [form_patch(delta, layout, rank, depth=depth, basis=basis) for rank in (1, 2, 4, 8, 16, 32)]
    errors = [error(patch, delta) for patch in patches]
    assert all(later <= earlier + 1e-6 for earlier, later in pairwise(errors))
    assert errors[-1] < 1e-4
    for before, after in pairwise(patches):
        assert all(less <= more + 1e-6 for less, more in zip(before.energy, after.energy, strict=True))


@families
@settings(max_examples=15)
@given(energy=st.floats(0.3, 0.99), seed=st.integers(0, 1000), shared=st.booleans())
def test_energy_keeps_enough_and_no_more(layout: Layout, energy: float, seed: int, shared: bool) -> None:
    delta = random_kv(layout, 12, seed=seed) * torch.linspace(1, 0.05, layout.features)
    basis = pooled(layout, full(layout)) if shared else None
    patch = form_patch(delta, layout, energy=energy, basis=basis)
    parts = zip(layout.split(delta), patch.segments, patch.energy, strict=True)
    for index, (segment, part, kept) in enumerate(parts):
        rest = (part.dense() - segment).square().sum() / segment.square().sum()
        assert kept == pytest.approx(1 - float(rest), abs=1e-4)  # what is reported is what is kept
        assert kept >= energy - 1e-6
        if part.ranks[0] > 1:
            assert form_patch(delta, layout, part.ranks[0] - 1, basis=basis).energy[index] < energy
    assert form_patch(delta, layout, 2, energy=1.0, basis=basis).rank == 2


@settings(max_examples=50)
@given(depth=st.floats(0.001, 1.0), layers=st.integers(1, 80))
def test_depth_is_the_share_of_layers_rounded_up(depth: float, layers: int) -> None:
    covered = layers - first_patched_layer(depth, layers)
    assert 1 <= covered <= layers
    assert covered - 1 <= depth * layers <= covered + 1e-6


@pytest.mark.parametrize("depth", [0.0, -0.5, 1.01, math.nan])
def test_a_depth_outside_its_range_is_refused(depth: float) -> None:
    with pytest.raises(ShapeMismatch, match="depth"):
        form_patch(random_kv(GQA, 3), GQA, depth=depth)


@families
@pytest.mark.parametrize("depth", [0.2, 0.5, 0.8])
def test_a_deep_patch_is_the_deep_part_of_the_whole_one(layout: Layout, depth: float) -> None:
    delta = random_kv(layout, TOKENS)
    deep, own = form_patch(delta, layout, depth=depth), form_patch(delta, layout)
    assert torch.equal(deep.dense(), own.dense()[deep.first_layer :])
    assert deep.nbytes * layout.layers == own.nbytes * (layout.layers - deep.first_layer)


@families
def test_projecting_on_a_basis_of_the_deficits_own_directions_loses_nothing(layout: Layout) -> None:
    delta = random_kv(layout, TOKENS)
    own = form_patch(delta, layout, 4)
    shared = form_patch(delta, layout, basis=pool_basis([own], 4))
    torch.testing.assert_close(shared.dense(), own.dense(), rtol=1e-4, atol=1e-4)
    assert shared.energy == pytest.approx(own.energy, rel=1e-5)


@families
def test_a_pooled_basis_serves_a_deficit_that_it_has_not_seen(layout: Layout) -> None:
    """Deficits that share their directions, as a model's do (kamera.md §4), and differ in coefficients."""
    smallest = min(segment.features for segment in layout.segments)
    common = [torch.linalg.qr(torch.randn(layout.layers, s.features, 3)).Q for s in layout.segments]
    assert smallest > 3
    made = [torch.cat([torch.randn(layout.layers, TOKENS, 3) @ part.mT for part in common], -1) for _ in range(5)]
    basis = pool_basis([form_patch(delta, layout, 2) for delta in made[:4]], 3)
    shared = form_patch(made[4], layout, basis=basis)
    assert min(shared.energy) > 0.999
    assert min(form_patch(random_kv(layout, TOKENS), layout, basis=basis).energy) < 0.8  # it is not just any deficit


@families
def test_pooling_finds_the_directions_of_the_stacked_deficits(layout: Layout) -> None:
    deltas = [random_kv(layout, TOKENS, seed=seed) * torch.linspace(1, 0.1, layout.features) for seed in range(4)]
    basis = pool_basis([form_patch(delta, layout) for delta in deltas], 3)
    for part, stacked in zip(basis.directions, layout.split(torch.cat(deltas, 1)), strict=True):
        best = torch.linalg.svdvals(stacked.double())[:, :3].square().sum()
        assert float((stacked @ part).double().square().sum()) == pytest.approx(float(best), rel=1e-4)
        torch.testing.assert_close(part.mT @ part, torch.eye(3).expand(layout.layers, 3, 3), rtol=0, atol=1e-5)


def test_fewer_columns_than_features_make_a_basis_as_well() -> None:
    delta = random_kv(MHA, 3)
    basis = pool_basis([form_patch(delta, MHA)], 10)
    assert basis.rank == 3  # three tokens have no more directions
    torch.testing.assert_close(form_patch(delta, MHA, basis=basis).dense(), delta, rtol=1e-4, atol=1e-4)


@families
@dtypes
@pytest.mark.parametrize("delta", [0, 37])
def test_a_shared_basis_takes_the_same_fast_path(
    layout: Layout, dtype: torch.dtype, delta: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if host_kernel._loops() is None:
        pytest.skip("numba is not installed")
    kv = random_kv(layout, TOKENS, dtype)
    patch = form_patch(random_kv(layout, TOKENS, seed=3), layout, 3, dtype=dtype, basis=pooled(layout, 6))
    calls: list[bool] = []
    fused = host_kernel.apply
    monkeypatch.setattr(host_kernel, "apply", lambda *arguments: calls.append(fused(*arguments)) or calls[-1])
    result = apply(kv, patch, delta, layout)
    assert calls == [True]
    monkeypatch.setattr(host_kernel, "apply", lambda *_: False)
    torch.testing.assert_close(result, apply(kv, patch, delta, layout), rtol=1e-5 if dtype is torch.float32 else 2**-7,
                               atol=1e-5)  # fmt: skip


@families
@dtypes
def test_a_warm_kernel_compiles_nothing_more(
    layout: Layout, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (loops := host_kernel._loops()) is None:
        pytest.skip("numba is not installed")
    from numba import typeof

    taken: set[tuple[object, ...]] = set()
    monkeypatch.setattr(
        host_kernel, "_loops", lambda: lambda *a: taken.add(tuple(map(typeof, a))) or loops(*a)
    )  # fmt: skip
    warm_up(layout, dtype)
    warm = set(taken)
    kv, delta = random_kv(layout, TOKENS, dtype), random_kv(layout, TOKENS, seed=3)
    eight_bits = form_patch(delta, layout, 3, dtype=torch.int8, spread=True)
    summed = compose([eight_bits, form_patch(-delta, layout, 2, dtype=torch.int8)], 0.7)
    shared = form_patch(delta, layout, 3, dtype=dtype, basis=pooled(layout, 6))
    weighted = replace(eight_bits, segments=tuple(part.weighted(torch.rand(1, TOKENS)) for part in eight_bits.segments))
    for patch in (None, eight_bits, summed, weighted, shared, form_patch(delta, layout, 3, dtype=dtype, depth=0.5)):
        for shift in (0, 37):
            apply(kv, patch, shift, layout)
            apply(kv, patch, shift, layout, out=kv.clone())
    for place in range(layout.layers):
        apply(kv[place : place + 1], eight_bits.of_layer(place), 5, layout.of_one_layer)
    assert len(warm) == 2
    assert taken == warm


def test_versions_follow_from_the_numbers() -> None:
    basis = pooled(GQA, 4)
    again = SharedBasis(tuple(part.clone() for part in basis.directions), basis.first_layer)
    assert again.version == basis.version
    other = tuple(part.clone() for part in basis.directions)
    other[1][0, 0, 0] += 1e-6
    assert SharedBasis(other).version != basis.version
    assert pooled(GQA, 4, depth=0.5).version != basis.version


def test_coefficients_need_the_basis_that_they_were_made_for() -> None:
    basis, other = pooled(GQA, 4), pooled(GQA, 5)
    bound = form_patch(random_kv(GQA, TOKENS), GQA, basis=basis)
    stored = bound.unbound
    for use in (lambda: apply(random_kv(GQA, TOKENS), stored, 0, GQA), stored.dense, lambda: compose([stored])):
        with pytest.raises(ShapeMismatch, match=basis.version):
            use()
    for wrong in (None, other):
        with pytest.raises(ShapeMismatch, match=basis.version):
            stored.bind(wrong)
    assert torch.equal(stored.bind(basis).dense(), bound.dense())
    own = form_patch(random_kv(GQA, TOKENS), GQA, 2)
    assert own.bind(basis) is own


def test_a_basis_of_another_model_is_refused() -> None:
    with pytest.raises(ShapeMismatch, match="layout needs"):
        form_patch(random_kv(MLA, 5), MLA, basis=pooled(GQA, 4))
    with pytest.raises(ShapeMismatch, match="the same layers"):
        pool_basis([form_patch(random_kv(GQA, 5), GQA), form_patch(random_kv(GQA, 5), GQA, depth=0.5)], 4)
    with pytest.raises(ShapeMismatch, match="the same layers"):
        pool_basis([], 4)


@families
def test_deep_and_shared_go_together(layout: Layout) -> None:
    delta = random_kv(layout, TOKENS)
    whole, deep = pooled(layout, full(layout)), pooled(layout, full(layout), depth=0.5)
    first = first_patched_layer(0.5, layout.layers)
    for patch in (form_patch(delta, layout, depth=0.5, basis=whole), form_patch(delta, layout, basis=deep)):
        assert patch.first_layer == first
        torch.testing.assert_close(patch.dense(), delta[first:], rtol=1e-4, atol=1e-4)


@families
@settings(max_examples=15)
@given(scale=st.floats(0.1, 1.5), count=st.integers(1, 4), shared=st.booleans())
def test_composition_counts_the_fixed_prefix_once(layout: Layout, scale: float, count: int, shared: bool) -> None:
    behind_prefix = random_kv(layout, TOKENS, seed=7)
    added = [random_kv(layout, TOKENS, seed=20 + i) for i in range(count)]
    basis = pooled(layout, full(layout)) if shared else None
    pairs = [form_patch(behind_prefix + more, layout, kind=PatchKind.pair, basis=basis) for more in added]
    composed = compose(pairs, scale, base=form_patch(behind_prefix, layout, basis=basis))
    expected = behind_prefix + scale * torch.stack(added).sum(0)
    torch.testing.assert_close(composed.dense(), expected, rtol=1e-3, atol=1e-3)
    assert composed.kind is PatchKind.composed
    if shared:  # coefficients of the same directions add up
        assert composed.rank == pairs[0].rank


@families
def test_shared_patches_of_unequal_ranks_and_depths_compose(layout: Layout) -> None:
    basis = pooled(layout, 6)
    delta = [random_kv(layout, TOKENS, seed=seed) for seed in (1, 2)]
    wide, narrow = (form_patch(d, layout, rank, basis=basis) for d, rank in zip(delta, (5, 2), strict=True))
    torch.testing.assert_close(compose([narrow, wide]).dense(), narrow.dense() + wide.dense(), rtol=1e-4, atol=1e-4)
    deep = form_patch(delta[0], layout, 5, depth=0.5, basis=basis)
    expected = narrow.dense().clone()
    expected[deep.first_layer :] += deep.dense()
    torch.testing.assert_close(compose([deep, narrow]).dense(), expected, rtol=1e-4, atol=1e-4)


@families
@settings(max_examples=10)
@given(rank=st.integers(1, 8), depth=st.sampled_from([1.0, 0.5]))
def test_an_update_is_what_the_stale_patch_lacks(layout: Layout, rank: int, depth: float) -> None:
    delta, changed = random_kv(layout, TOKENS, seed=1), random_kv(layout, TOKENS, seed=2)
    stale = form_patch(delta, layout, 3, depth=depth)
    rest = remainder(changed, stale)
    assert torch.equal(rest[: stale.first_layer], changed[: stale.first_layer])
    update = form_patch(rest, layout, rank, kind=PatchKind.update)
    before, after = (remainder(changed, patch).norm() for patch in (stale, compose([stale, update])))
    assert after <= before + 1e-4
    torch.testing.assert_close(
        remainder(rest, update), remainder(changed, compose([stale, update])), rtol=1e-3, atol=1e-4
    )


@families
def test_removal_undoes_what_an_antecedent_added(layout: Layout) -> None:
    """Taking A out again is the inverse of adding A behind S, and leaves S' own conditioning alone."""
    canonical, kept = random_kv(layout, TOKENS), random_kv(layout, TOKENS, seed=1)
    survivor = kept + 0.1 * random_kv(layout, TOKENS, seed=2)  # KV(B|A,S): KV(B|S) and what A added
    removal = form_patch(deficit(kept, survivor), layout, kind=PatchKind.removal)
    addition = form_patch(deficit(survivor, kept), layout)
    torch.testing.assert_close(removal.dense(), -addition.dense(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(apply(survivor, removal, 0, layout), kept, rtol=1e-5, atol=1e-5)
    both = form_patch(deficit(survivor, canonical), layout)
    torch.testing.assert_close(compose([both, removal]).dense(), deficit(kept, canonical), rtol=1e-4, atol=1e-4)


def test_a_remainder_needs_the_deficit_of_the_same_chunk() -> None:
    with pytest.raises(ShapeMismatch, match="does not fit"):
        remainder(random_kv(GQA, 5), form_patch(random_kv(GQA, 6), GQA, 2))


@pytest.mark.parametrize("count", range(5))
def test_up_to_four_predecessors_are_ordered_exhaustively(count: int) -> None:
    assert sorted(orderings(range(count))) == sorted(permutations(range(count)))


@pytest.mark.parametrize("count", [5, 6, 9, 30])
def test_more_are_sampled_without_repeating_any(count: int) -> None:
    drawn = orderings(range(count))
    assert len(drawn) == len(set(drawn)) == ORBIT_ORDERINGS
    assert all(sorted(order) == list(range(count)) for order in drawn)
    assert drawn == orderings(range(count))
    assert drawn != orderings(range(count), seed=1)
    firsts = {order[0] for order in drawn}
    assert len(firsts) > min(count, ORBIT_ORDERINGS) / 3  # not all alike


@families
def test_an_orbit_patch_serves_an_ordering_that_was_held_out(layout: Layout) -> None:
    """Orderings share most of their deficit, as measured (kamera.md §5): the mean of the others is nearer than any."""
    common = random_kv(layout, TOKENS)
    deltas = [common + 0.5 * random_kv(layout, TOKENS, seed=seed) for seed in range(1, 7)]
    held_out, others = deltas[0], deltas[1:]
    orbit = form_patch(mean_deficit(others), layout, kind=PatchKind.orbit)
    transferred = [form_patch(delta, layout) for delta in others]
    assert error(orbit, held_out) < min(error(patch, held_out) for patch in transferred)


@families
@dtypes
@settings(max_examples=25)
@given(
    tokens=st.integers(1, 40),
    rank=st.one_of(st.none(), st.integers(1, 40)),
    depth=st.sampled_from([1.0, 0.5, 0.3]),
    shared=st.booleans(),
    factors=st.sampled_from(FactorType),
)
def test_the_footprint_is_what_a_patch_takes(
    layout: Layout, dtype: torch.dtype, tokens: int, rank: int | None, depth: float, shared: bool, factors: FactorType
) -> None:
    basis = pooled(layout, 6, patches=2) if shared else None
    form = PatchForm(rank, None, depth, basis, factors, spread=False)
    kv = random_kv(layout, tokens, dtype)
    patch = form.form(kv.float(), layout, PatchKind.own, dtype)
    footprint = form.footprint(tokens, layout, dtype)
    assert footprint.own == patch.nbytes
    assert footprint.canonical == kv.nbytes
    assert footprint.shared == (basis.nbytes if basis else 0)
    assert footprint.per_patch(4) == patch.nbytes + (basis.nbytes / 4 if basis else 0)
    if not shared:
        assert form.footprint(tokens, layout, dtype, parts=3).own == compose([patch] * 3).nbytes
    assert replace(form, spread=True).form(kv.float(), layout, PatchKind.own, dtype).nbytes <= footprint.own


def test_a_form_names_its_patches_by_everything_that_changes_them() -> None:
    basis = pooled(GQA, 4)
    forms = [PatchForm(), PatchForm(16), PatchForm(None), PatchForm(32, 0.9), PatchForm(32, None, 0.5),
             PatchForm(basis=basis), PatchForm(basis=pooled(GQA, 5)), PatchForm(spread=False),
             PatchForm(factors=FactorType.model), PatchForm(factors=FactorType.model, spread=False)]  # fmt: skip
    keys = {form.key("c", "a", kind) for form in forms for kind in PatchKind}
    assert len(keys) == len(forms) * len(PatchKind)
    first = PatchForm(factors=FactorType.model, spread=False).key("c", "a", PatchKind.own)
    assert first == patch_key("c", "a", "own", 32)  # libraries of before there were others


@families
def test_a_truncated_patch_is_the_best_of_its_rank(layout: Layout) -> None:
    delta = random_kv(layout, TOKENS).float()
    limit = min(TOKENS, *(segment.features for segment in layout.segments))
    wide = form_patch(delta, layout, rank=limit - 1)
    for rank in range(1, limit):
        torch.testing.assert_close(wide.truncated(rank).dense(), form_patch(delta, layout, rank=rank).dense())
    assert torch.equal(wide.truncated(limit + 5).dense(), wide.dense())


@families
def test_the_deep_part_of_a_patch_is_the_patch_of_the_deep_layers(layout: Layout) -> None:
    delta = random_kv(layout, TOKENS).float()
    deep = form_patch(delta, layout, rank=2).from_depth(0.5)
    formed = form_patch(delta, layout, rank=2, depth=0.5)
    assert deep.first_layer == formed.first_layer
    torch.testing.assert_close(deep.dense(), formed.dense())
