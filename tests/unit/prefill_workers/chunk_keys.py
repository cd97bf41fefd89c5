"""Keys of chunks whose records nobody stores."""

from __future__ import annotations

from prefill_workers.link.keys import ChunkKeys


def chunk_keys(canonical: str = "canonical", own_patch: str = "patch", context: tuple[int, ...] = ()) -> ChunkKeys:
    """Keys of a text chunk of tenant `local`."""
    return ChunkKeys(canonical, context, own_patch, "", None, owner="local", patch_owners=("local",))
