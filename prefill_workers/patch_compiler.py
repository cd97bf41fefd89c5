"""The patch compiler: deficits in, stored patches out, off the request path."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from kvstore.format import PatchRecord
from kvstore.layout import Layout
from kvstore.library import Library
from kvstore.patch import PatchKind, form_patch

logger = logging.getLogger(__name__)


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
    recompute_seconds: float = 0.0  # what linking without the patch costs


class PatchCompiler:
    """Forms patches of one rank and stores them.

    Args:
        library: where patches go; workers find them there by key.
        rank: rank of the factors per layer and segment; None keeps full rank.
        device: where the factorisation runs; "cuda" where a GPU is at hand.
    """

    def __init__(self, library: Library, rank: int | None, device: str | None = None) -> None:
        self.library = library
        self._rank = rank
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.formed = 0
        self.seconds = 0.0

    @torch.inference_mode()
    def compile(self, job: PatchJob) -> PatchRecord:
        """Factor a deficit [layers, tokens, features] and store the patch (kamera.md eq. 1, 2)."""
        began = time.perf_counter()
        dtype = getattr(torch, job.dtype)
        patch = form_patch(job.delta.to(self._device), job.layout, rank=self._rank, kind=job.kind, dtype=dtype)
        record = PatchRecord(
            key=job.key,
            fingerprint=job.fingerprint,
            tenant=job.tenant,
            layout=job.layout,
            patch=patch,
            canonical=job.canonical,
            antecedent=job.antecedent,
            content=job.content,
            antecedents=job.antecedents,
            recompute_seconds=job.recompute_seconds,
        )
        self.library.put_patch(record)
        self.formed += 1
        self.seconds += time.perf_counter() - began
        logger.debug("patch %s: rank %d, %d bytes", job.key[:16], patch.rank, patch.nbytes)
        return record
