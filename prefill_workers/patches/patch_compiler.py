"""The patch compiler: deficits in, stored patches out, off the request path."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from infra.cpu import openmp
from kvstore.catalog.index import Entry, Scope
from kvstore.errors import StoreError
from kvstore.library import Library
from kvstore.operator.basis import pool_basis
from kvstore.operator.layout import Layout
from kvstore.operator.patch import Patch, PatchKind
from kvstore.records.patch_form import PatchForm
from kvstore.records.record import BasisRecord, PatchRecord
from prefill_workers.settings import PatchFormSettings

logger = logging.getLogger(__name__)

_BASIS_SECONDS = 1e6  # every patch that was made of a basis is lost with it: it leaves the library last


class UnknownBasis(StoreError):
    """The shared basis that the settings name is not in the library."""


def load_form(settings: PatchFormSettings, library: Library) -> PatchForm:
    """The form that the settings describe, its shared basis taken from the library.

    Raises:
        UnknownBasis: the library has no basis of that version for this model, or a tier did not give it.
    """
    basis = None
    if settings.basis is not None:
        record = library.get_basis(settings.basis)
        if record is None:
            raise UnknownBasis(f"patch.basis: the library gives no shared basis {settings.basis!r} of this model")
        basis = record.basis
    return PatchForm(settings.rank, settings.energy, settings.depth, basis, settings.factors, settings.spread)


@dataclass(frozen=True)
class PatchJob:
    """A deficit on its way to the patch compiler."""

    key: str
    kind: PatchKind
    delta: Tensor  # [layers, tokens, features] fp32
    layout: Layout
    fingerprint: str
    dtype: str
    tenant: str
    canonical: str  # key of the canonical KV that the patch is for
    antecedent: str  # key of what stands before it
    content: str
    antecedents: tuple[str, ...]  # content ids of the chunks before it: deleting one deletes the patch
    prefix: str  # names the fixed prefix (see `kvstore.catalog.index.prefix_key`)
    recompute_seconds: float = 0.0  # what linking without the patch costs

    @property
    def entry(self) -> Entry:
        """The patch as an index lists it once it is stored."""
        return Entry(Scope(self.tenant, self.prefix), self.content, self.antecedents, self.kind is PatchKind.own)


class PatchCompiler:
    """Forms patches of one form and stores them.

    Args:
        library: where patches go; workers find them there by key.
        form: of the patches; the same as the linkers', or they do not find them.
        pool: how many patches to pool into a shared basis, which is then stored under its version; 0: none.
        device: where the factorisation runs. Not on a GPU unless told: it may be full. Patches on
            a shared basis are formed where that is.
    """

    def __init__(self, library: Library, form: PatchForm, pool: int = 0, device: str = "cpu") -> None:
        self.library = library
        self._form = form
        self._pool_size = 0 if form.basis is not None else pool
        self._pool: list[Patch] = []
        self._device = torch.device(device if form.basis is None else form.basis.directions[0].device)
        # of the lowest priority that there is, which is the default stream's: yet that does not wait for this one
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self.formed = 0
        self.seconds = 0.0

    @torch.inference_mode()
    def compile(self, job: PatchJob) -> PatchRecord:
        """Factor a deficit [layers, tokens, features] and store the patch (kamera.md eq. 1, 2)."""
        began = time.perf_counter()
        dtype = getattr(torch, job.dtype)
        # most of it are eigenvectors of small matrices: a second thread costs half as much again
        with openmp.alone(), torch.cuda.stream(self._stream):
            patch = self._form.form(job.delta.to(self._device), job.layout, job.kind, dtype).on_host()
        record = PatchRecord(
            key=job.key,
            fingerprint=job.fingerprint,
            tenant=job.tenant,
            layout=job.layout,
            patch=patch.unbound,  # as it is read back
            canonical=job.canonical,
            antecedent=job.antecedent,
            prefix=job.prefix,
            content=job.content,
            antecedents=job.antecedents,
            recompute_seconds=job.recompute_seconds,
        )
        self.library.put(record)
        self.formed += 1
        self.seconds += time.perf_counter() - began
        logger.debug("patch %s: rank %d, %d bytes", job.key[:16], patch.rank, patch.nbytes)
        if len(self._pool) < self._pool_size:
            self._pool.append(patch)
            if len(self._pool) == self._pool_size:
                self._store_basis(job)
        return record

    def _store_basis(self, job: PatchJob) -> None:
        basis = pool_basis(self._pool, max(patch.rank for patch in self._pool))
        self.library.put(
            BasisRecord(
                key=basis.version,
                fingerprint=job.fingerprint,
                tenant="",
                layout=job.layout,
                basis=basis,
                content=basis.version,
                recompute_seconds=_BASIS_SECONDS,
                meta={"pooled": len(self._pool)},
            )
        )
        logger.info("shared basis of rank %d pooled from %d patches: %s", basis.rank, len(self._pool), basis.version)
        self._pool, self._pool_size = [], 0
