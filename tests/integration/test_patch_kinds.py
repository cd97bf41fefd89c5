"""Every form of patch on a real engine, and the background work that forms patches for whole sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rig import Rig, apart

from kvstore.library import Library
from kvstore.operator.basis import pool_basis
from kvstore.operator.patch import Patch
from kvstore.records.patch_form import PatchForm
from kvstore.settings import FactorType, LibrarySettings
from prefill_workers.engine.engine import PrefillEngine

pytestmark = pytest.mark.engine

PAGES = ["See ", 1, " and ", 2, " and then say what follows."]
FULL = 128  # features of the tiny model's keys, and of its values: 2 KV heads of 32, so more than enough


def stored_patches(rig: Rig) -> list[Patch]:
    """The own patches of the pages, as the library returns them."""
    found = [rig.library.get_patch(chunk.keys.own_patch, "local") for chunk in rig.plan(PAGES).chunks]
    return [record.patch for record in found if record is not None]


def off(rig: Rig, mode: str = "auto") -> float:
    """How far the second chunk's KV is from exact."""
    return apart(rig.link(PAGES, mode).chunk_kv(1), rig.link(PAGES, "exact").chunk_kv(1))


@pytest.mark.parametrize("spread", [True, False])
def test_more_of_the_deficit_is_nearer_to_exact_in_every_form(make_rig: Callable[..., Rig], spread: bool):
    forms = [PatchForm(8, None, 0.5), PatchForm(8), PatchForm(None, 0.99), PatchForm(None)]
    rigs = [make_rig(form=replace(form, factors=FactorType.model, spread=spread)) for form in forms]
    for rig in rigs:
        rig.link(PAGES, "auto")
    errors = [off(rig) for rig in rigs]
    assert errors == sorted(errors, reverse=True)
    assert off(rigs[0], "full-reuse") > errors[1]
    assert errors[-1] < 1e-5


def test_patches_of_the_default_form_serve_from_disk_at_half_the_bytes(
    make_rig: Callable[..., Rig], bf16: PrefillEngine, tmp_path: Path
):
    """int8 against the model's dtype at the same rank: as near to exact, read from disk every time."""
    rigs, kept = [], []
    forms = [PatchForm(), PatchForm(factors=FactorType.model, spread=False)]
    for number, form in enumerate(forms):
        settings = LibrarySettings(directory=tmp_path / str(number), memory_bytes=0)
        rigs.append(make_rig(bf16, library=Library(settings, bf16.fingerprint), form=form))
        rigs[-1].link(PAGES, "auto")
        assert rigs[-1].link(PAGES, "auto").points == ["patched", "patched"]
        kept.append(sum(patch.nbytes for patch in stored_patches(rigs[-1])))
    default, wide = (off(rig) for rig in rigs)
    assert default < off(rigs[0], "full-reuse") / 2
    assert default < 1.2 * wide
    assert kept[0] < 0.55 * kept[1]


def test_links_with_a_shared_basis_come_as_near_as_its_span_allows(
    make_rig: Callable[..., Rig], fp32: PrefillEngine, tmp_path: Path
):
    """Read from disk every time: what is stored are coefficients, the linker brings the basis."""
    teacher = make_rig()
    teacher.link(PAGES, "auto")
    stored = stored_patches(teacher)
    assert len(stored) == 2
    narrow, wide = (pool_basis(stored, rank) for rank in (4, FULL))
    rigs = []
    for basis in (narrow, wide):
        cold = Library(LibrarySettings(directory=tmp_path / basis.version, memory_bytes=0), fp32.fingerprint)
        rigs.append(make_rig(library=cold, form=PatchForm(None, basis=basis, factors=FactorType.model)))
    for rig in rigs:
        rig.link(PAGES, "auto")
        again = rig.link(PAGES, "auto")
        assert again.points == ["patched", "patched"]
        assert all(part.right is None for patch in stored_patches(rig) for part in patch.segments)
    errors = [off(rig) for rig in rigs]
    assert off(rigs[0], "full-reuse") > errors[0] > errors[1]
    assert errors[1] < 1e-5


def test_a_set_of_six_is_served_in_a_new_order_but_for_what_lies_in_between(make_rig: Callable[..., Rig]):
    rig = make_rig(orbit_chunks=6)
    rig.link([0, 1, 2, 3, 4, 5, "What is common?"], "auto")
    assert rig.compiler.formed > 6 + 6 + 6 + 24  # own, leading, whole set, nearly all of 30 pairs
    order = [5, 0, 3, 1, 4, 2, "What is common?"]
    linked, blind, exact = (rig.link(order, mode) for mode in ("auto", "full-reuse", "exact"))
    kinds = [chunk.reason.split()[1] if "patch for these" in chunk.reason else "none" for chunk in linked.result.chunks]
    assert kinds == ["orbit", "pair", "none", "none", "none", "orbit"]
    last = exact.chunk_kv(5)
    assert apart(linked.chunk_kv(5), last) < apart(blind.chunk_kv(5), last)
    wrong = [(found.logprobs - exact.logprobs).abs().max() for found in (linked, blind)]
    assert 0 < wrong[0] < wrong[1]
