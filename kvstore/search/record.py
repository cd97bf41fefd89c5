"""Record of an indexed file, in the library like all that derives from content.

One record per file, embedder and way to take it apart: a replica that starts reads every file's, so that fewer reads
matter. Written by whoever indexes the file; two that do write the same. It is derived data: where it is missing,
damaged or of another embedder the file is indexed again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvstore.records.keys import index_key
from kvstore.records.record import EmbeddingRecord
from kvstore.search.grown import Array
from kvstore.search.index import Part, part_from_json, part_to_json


def index_record(
    parts: Sequence[Part],
    vectors: Sequence[Array] | None,
    *,
    content: str,
    owner: str,
    embedder: str,
    form: str,
    seconds: float,
) -> EmbeddingRecord:
    """The record of a file's parts.

    Args:
        vectors: by part, [m, dims].
        form: the way the file was taken apart.
        seconds: that it took, and would take again.
    """
    counts = None if vectors is None else [len(one) for one in vectors]
    whole = np.concatenate(vectors) if vectors else np.zeros((0, 1))
    if not len(whole):  # a record has numbers
        whole = np.zeros((1, max(1, whole.shape[1])))
    meta = {"parts": [part_to_json(part) for part in parts], "counts": counts}
    return EmbeddingRecord(
        key=index_key(embedder, content, form),
        fingerprint=embedder,
        tenant=owner,
        content=content,
        recompute_seconds=seconds,
        meta=meta,
        embeddings=torch.from_numpy(np.ascontiguousarray(whole, np.float16)),
    )


def read_index_record(record: EmbeddingRecord) -> tuple[list[Part], list[Array] | None]:
    """Parts and vectors, [m, dims] each, of a record."""
    meta: Any = record.meta
    parts = [part_from_json(one) for one in meta["parts"]]
    if meta["counts"] is None:
        return parts, None
    whole, ends = record.embeddings.numpy(), np.cumsum(meta["counts"])
    return parts, [whole[end - count : end] for end, count in zip(ends, meta["counts"], strict=True)]
