"""The patch compiler: forms as the settings say, and pools a shared basis that later patches are made of."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kvstore_support import FINGERPRINT, GQA, random_kv

from kvstore.errors import ShapeMismatch
from kvstore.library import Library
from kvstore.operator.apply import apply
from kvstore.operator.patch import PatchKind, form_patch
from kvstore.records.patch_form import PatchForm
from kvstore.settings import FactorType, LibrarySettings
from prefill_workers.patches.device_forming import DeviceForming
from prefill_workers.patches.patch_compiler import PatchCompiler, PatchJob, UnknownBasis, load_form
from prefill_workers.settings import PatchFormSettings
from serving.config import OrbitServeConfig
from serving.replicas import patch_compiler as patch_replica


def job(number: int, form: PatchForm, kind: PatchKind = PatchKind.own) -> PatchJob:
    return PatchJob(
        key=form.key("c" * 64, f"behind {number}", kind),
        kind=kind,
        delta=random_kv(GQA, 9, seed=number),
        layout=GQA,
        fingerprint=FINGERPRINT,
        dtype="bfloat16",
        tenant="acme",
        canonical="c" * 64,
        antecedent=f"behind {number}",
        content="content",
        antecedents=(),
        prefix="prefix",
    )


def test_patches_are_formed_as_the_settings_say(tmp_path: Path):
    with Library(LibrarySettings(directory=tmp_path), FINGERPRINT) as library:
        chosen = PatchFormSettings(rank=6, energy=0.5, depth=0.5, factors=FactorType.model, spread=False)
        form = load_form(chosen, library)
        assert form == PatchForm(6, 0.5, 0.5, None, FactorType.model, spread=False)
        record = PatchCompiler(library, form, device="cpu").compile(job(1, form, PatchKind.orbit))
        expected = form_patch(random_kv(GQA, 9, seed=1), GQA, 6, 0.5, PatchKind.orbit, torch.bfloat16, depth=0.5)
        assert record.patch.kind is PatchKind.orbit
        assert 0 < record.patch.rank < 6  # half of the energy needs fewer
        assert torch.equal(record.patch.dense(), expected.dense())
        assert library.get_patch(record.key, "acme") is record


def test_by_default_factors_are_int8_and_rank_goes_where_the_deficit_is(tmp_path: Path):
    with Library(LibrarySettings(directory=tmp_path), FINGERPRINT) as library:
        form = load_form(PatchFormSettings(rank=2), library)
        assert form == PatchForm(2)
        weighed = torch.tensor([0.1, 0.1, 10.0])[:, None, None]
        asked = job(1, form)
        record = PatchCompiler(library, form, device="cpu").compile(replace(asked, delta=asked.delta * weighed))
        for part in record.patch.segments:
            assert (part.left.dtype, part.right.dtype) == (torch.int8, torch.int8)
            assert part.ranks[2] == 4 > max(part.ranks[:2])
        assert record.patch.nbytes <= form.footprint(9, GQA, torch.bfloat16).own


def test_a_basis_is_pooled_once_and_serves_patches_of_other_processes(tmp_path: Path):
    """Three stages, as operated: own directions, pooled to a version; compiled with it; read back by another worker."""
    settings = LibrarySettings(directory=tmp_path)
    with Library(settings, FINGERPRINT) as library:
        own = PatchForm(4)
        compiler = PatchCompiler(library, own, pool=3, device="cpu")
        for number in range(5):
            compiler.compile(job(number, own))
        library.flush()
    (stored,) = tmp_path.rglob("basis/**/*.arrow")
    version = stored.stem

    with Library(settings, FINGERPRINT) as library:
        form = load_form(PatchFormSettings(rank=3, basis=version), library)
        assert form.basis is not None
        assert (form.basis.version, form.basis.rank) == (version, 4)
        compiled = PatchCompiler(library, form, device="cpu").compile(job(9, form))
        assert all(part.right is None for part in compiled.patch.segments)  # what is kept is what is counted
        assert compiled.nbytes == sum(part.nbytes for part in compiled.patch.segments)

    with Library(settings, FINGERPRINT) as library:
        form = load_form(PatchFormSettings(rank=3, basis=version), library)
        read = library.get_patch(compiled.key, "acme")
        assert read is not None
        kv = random_kv(GQA, 9, torch.bfloat16)
        result = apply(kv, read.patch.bind(form.basis), 5, GQA)
        assert torch.equal(result, apply(kv, compiled.patch.bind(form.basis), 5, GQA))


def test_a_basis_that_the_library_lacks_is_named(tmp_path: Path):
    with (
        Library(LibrarySettings(directory=tmp_path), FINGERPRINT) as library,
        pytest.raises(UnknownBasis, match=r"patch\.basis.*'0a0a"),
    ):
        load_form(PatchFormSettings(basis="0a" * 32), library)


# In a prefill worker's process


async def test_beside_an_engine_patches_form_on_another_thread_in_order_and_errors_are_the_callers(tmp_path: Path):
    with Library(LibrarySettings(directory=tmp_path), FINGERPRINT) as library:
        form = PatchForm(2)
        forming = DeviceForming(PatchCompiler(library, form))
        deficits = [job(number, form) for number in range(3)]
        await asyncio.gather(*map(forming.compile, deficits))
        assert all(library.has("patch", one.key, one.tenant) for one in deficits)
        with pytest.raises(ShapeMismatch):
            await forming.compile(replace(deficits[0], delta=torch.zeros(1, 1, 1)))
        forming.close()
        with pytest.raises(RuntimeError):
            await forming.compile(deficits[0])


async def test_beside_an_engine_a_deficit_that_waits_while_its_content_is_deleted_leaves_no_patch(tmp_path: Path):
    with Library(LibrarySettings(directory=tmp_path, deletion_grace_s=0), FINGERPRINT) as library:
        forming, asked = DeviceForming(PatchCompiler(library, PatchForm(2))), job(1, PatchForm(2))
        free = threading.Event()
        forming._thread.submit(free.wait)
        waiting = asyncio.create_task(forming.compile(asked))
        await asyncio.sleep(0)
        forming.forget(asked.content, asked.tenant)
        free.set()
        await waiting
        forming._thread.shutdown()
        assert not library.has("patch", asked.key, asked.tenant)


# The role


def role(directory: Path, monkeypatch: pytest.MonkeyPatch, **library: float) -> patch_replica.PatchCompiler:
    monkeypatch.setattr(patch_replica, "enter", lambda settings: None)  # it would set up this process
    settings = {"model": {"path": "somewhere"}, "library": {"directory": directory, **library}}
    return patch_replica.PatchCompiler(OrbitServeConfig.model_validate(settings))


def is_stored(directory: Path, asked: PatchJob) -> bool:
    with Library(LibrarySettings(directory=directory), FINGERPRINT) as library:
        return library.has("patch", asked.key, asked.tenant)


async def test_a_basis_that_cannot_be_loaded_leaves_no_threads_behind(tmp_path: Path, monkeypatch):
    compiler, asked = role(tmp_path, monkeypatch), job(1, PatchForm())
    compiler._settings = compiler._settings.model_copy(
        update={"patch": compiler._settings.patch.model_copy(update={"basis": "0a" * 32})}
    )
    before = threading.active_count()
    for _ in range(3):
        with pytest.raises(UnknownBasis):
            await compiler.compile(asked)
    for _ in range(500):  # some end a moment later
        if threading.active_count() <= before + 1:  # the compiler's own
            break
        await asyncio.sleep(0.01)
    assert threading.active_count() <= before + 1


async def test_what_was_deleted_before_a_compiler_has_formed_anything_is_not_formed(tmp_path: Path, monkeypatch):
    compiler, asked = role(tmp_path, monkeypatch), job(1, PatchForm())
    other = replace(job(2, PatchForm()), content="other")
    await compiler.forget(asked.content, asked.tenant)
    for deficit in (asked, other):
        await compiler.compile(deficit)
    await compiler.flush()
    assert (is_stored(tmp_path, asked), is_stored(tmp_path, other)) == (False, True)


async def test_a_deficit_that_waits_longer_than_deletions_are_remembered_leaves_no_patch(tmp_path: Path, monkeypatch):
    compiler, asked = role(tmp_path, monkeypatch, deletion_grace_s=0), job(1, PatchForm())
    free = threading.Event()
    compiler._thread.submit(free.wait)
    waiting = asyncio.create_task(compiler.compile(asked))
    await asyncio.sleep(0)
    await compiler.forget(asked.content, asked.tenant)
    free.set()
    await waiting
    await asyncio.wrap_future(compiler._thread.submit(lambda: None))
    await compiler.flush()
    assert not is_stored(tmp_path, asked)
