"""Content ids, and the keys under which canonicals, patches and embeddings are stored.

Every key is the BLAKE3 digest, as 64 hex digits, of a domain string and length-prefixed fields, so that no two
different lists of fields share bytes and no key of one kind equals a key of another.

    content bytes, salt of the tenant or of the dynamic library -> content id
    content id, model fingerprint, delimiters, dtype -> canonical key
    fixed prefix, antecedents (content ids) -> antecedent key
    canonical key, antecedent key, kind, form -> patch key
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np
from blake3 import blake3

DYNAMIC_TENANT = "dynamic-library"  # owns what is derived from references alone; no API key may name it
_SHARED = "shared-"
_THREADED_BYTES = 4 << 20  # BLAKE3 gains from a second thread above about this size
_PREFIXES = 64  # whose bytes are kept: a request names its own once for every key of every chunk


def _digest(domain: str, fields: Iterable[bytes], version: int = 1) -> str:
    hasher = blake3(derive_key_context=f"orbitserve 2026 {domain} v{version}")
    for field in fields:
        hasher.update(len(field).to_bytes(8, "little"))
        hasher.update(field)
    return hasher.hexdigest()


def _integers(values: Sequence[int]) -> bytes:
    return np.array(values, dtype="<i8").tobytes()


_prefix_bytes = lru_cache(_PREFIXES)(_integers)


def tenant_salt(tenant: str, secret: bytes = b"") -> bytes:
    """The salt of a tenant's content ids: equal bytes of two tenants get unrelated ids.

    `secret` is the deployment's own; without it anyone who knows a tenant's name could compute the salt.
    """
    return bytes.fromhex(_digest("tenant salt", (secret, tenant.encode())))


def content_id(data: bytes, salt: bytes = b"") -> str:
    """Identity of a chunk's source bytes (image file, page, video segment)."""
    threads = blake3.AUTO if len(data) >= _THREADED_BYTES else 1
    hasher = blake3(derive_key_context="orbitserve 2026 content v1", max_threads=threads)
    hasher.update(len(salt).to_bytes(8, "little"))
    hasher.update(salt)
    hasher.update(data)
    return hasher.hexdigest()


def owned_content_id(data: bytes, owner: str, secret: bytes = b"") -> str:
    """Content id of bytes that a tenant, or the dynamic library, owns; owners share nothing.

    A reference's id is marked as shared, which tells the owner of derived records (`owner_of`).
    """
    content = content_id(data, tenant_salt(owner, secret))
    return _SHARED + content if owner == DYNAMIC_TENANT else content


def is_shared(content: str) -> bool:
    """True if a content id is a reference's."""
    return content.startswith(_SHARED)


def owner_of(tenant: str, *contents: str) -> str:
    """Owner of data derived from these contents alone: everyone, if all are references."""
    return DYNAMIC_TENANT if contents and all(map(is_shared, contents)) else tenant


def canonical_key(fingerprint: str, content: str, delimiters: Sequence[int], dtype: str) -> str:
    """Key of KV(B|∅).

    `fingerprint` covers the model and its processor settings; `delimiters` are token ids.
    """
    return _digest("canonical", (fingerprint.encode(), content.encode(), _integers(delimiters), dtype.encode()))


def antecedent_key(prefix_tokens: Sequence[int], antecedents: Sequence[str], ordered: bool) -> str:
    """Key of a chunk's antecedents: the fixed prefix's token ids and the chunks' ids.

    `ordered=False` (orbit and composed patches) makes every ordering of the same antecedents equal.
    """
    listed = list(antecedents) if ordered else sorted(antecedents)
    mode = b"ordered" if ordered else b"set"
    return _digest("antecedent", (mode, _prefix_bytes(tuple(prefix_tokens)), *(item.encode() for item in listed)))


def patch_key(
    canonical: str,
    antecedent: str,
    kind: str,
    rank: int | None,
    energy: float | None = None,
    depth: float = 1.0,
    basis: str = "",
    factors: str = "model",
    spread: bool = False,
) -> str:
    """Key of a patch.

    `kind` is a `PatchKind` or its value; rank None stands for full rank; `basis` is a version; `factors` is a
    `FactorType` or its value.
    """
    size = "full" if rank is None else str(rank)
    # Only what differs from the first form is written, so that adding a field leaves all other keys as they were.
    size += "" if energy is None else f" energy {energy!r}"
    size += "" if depth == 1.0 else f" depth {depth!r}"
    size += f" basis {basis}" if basis else ""
    size += "" if factors == "model" else f" factors {factors}"
    size += " spread" if spread else ""
    # Version 1: formed behind patched chunks, too, and of sets without what the chat template writes before them.
    return _digest("patch", (canonical.encode(), antecedent.encode(), str(kind).encode(), size.encode()), version=2)


def embedding_key(fingerprint: str, content: str, dtype: str) -> str:
    """Key of a chunk's vision embeddings; `dtype` is the one that they were encoded in."""
    return _digest("embedding", (fingerprint.encode(), content.encode(), dtype.encode()))


def session_key(fingerprint: str, session: str, dtype: str) -> str:
    """Key of a session's manifest; its tenant is the record's."""
    return _digest("session", (fingerprint.encode(), session.encode(), dtype.encode()))


def part_id(content: str, form: str, number: int) -> str:
    """Content id of a part of a file, such as a page.

    `form`: the way the file was taken apart; `number` from 0. A reference's parts are references.
    """
    digest = _digest("part", (content.encode(), form.encode(), _integers([number])))
    return _SHARED + digest if is_shared(content) else digest


def index_key(embedder: str, content: str, form: str) -> str:
    """Key of a file's index record; `embedder` is a fingerprint, `form` its parts'."""
    return _digest("index", (embedder.encode(), content.encode(), form.encode()))
