"""Under which names a request's chunks, and what is patched behind them, are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.chunk import DYNAMIC_TENANT, antecedent_key, canonical_key, owner_of
from kvstore.patch import PatchKind
from kvstore.patch_form import PatchForm
from prefill_workers.orbit import set_kind

if TYPE_CHECKING:
    from prefill_workers.engine import PrefillEngine


@dataclass(frozen=True)
class ChunkKeys:
    """Under which keys a chunk's records are stored, and whose they are."""

    canonical: str
    own_patch: str  # behind this list of antecedents
    set_patch: str  # behind this set, in any order
    embedding: str | None  # None: a text chunk
    owner: str  # of canonical KV and embeddings: the request's tenant, or the dynamic library
    patch_owners: tuple[str, ...]  # whose patches serve
    parts: tuple[str, ...] = ()  # patches behind no antecedent and behind each alone; none where no sum may serve

    def all(self) -> list[str]:
        """Every key."""
        named = (self.canonical, self.own_patch, self.set_patch, self.embedding, *self.parts)
        return [key for key in named if key is not None]


class Keys:
    """Makes them, for one engine and one form of patches."""

    def __init__(self, engine: PrefillEngine, form: PatchForm) -> None:
        self._engine, self._form = engine, form

    def of(
        self,
        tenant: str,
        contents: Sequence[str],
        delimiters: Sequence[int],
        prefix: Sequence[int],
        antecedents: Sequence[str],
        *,
        embeds: bool,
        summed: bool,
    ) -> ChunkKeys:
        """Keys of the last of `contents` behind the others, whose canonical keys are `antecedents`.

        Args:
            embeds: whether the chunk has vision embeddings.
            summed: whether pair patches behind so many antecedents are summed.
        """
        content = contents[-1]
        canonical = canonical_key(self._engine.fingerprint, content, delimiters, self._engine.precision)
        own, of_set = (
            self._form.key(canonical, antecedent_key(prefix, antecedents, ordered=kind is PatchKind.own), kind)
            for kind in (PatchKind.own, set_kind(len(antecedents)))
        )
        parts: tuple[str, ...] = ()
        different = len({canonical, *antecedents}) > len(antecedents)
        if different and summed:
            alone = [(), *((antecedent,) for antecedent in antecedents)]
            parts = tuple(
                self._form.key(canonical, antecedent_key(prefix, one, ordered=False), set_kind(len(one)))
                for one in alone
            )  # fmt: skip
        shared = owner_of(tenant, *contents) == DYNAMIC_TENANT
        return ChunkKeys(
            canonical,
            own,
            of_set,
            self._engine.embedding_key(content) if embeds else None,
            owner=owner_of(tenant, content),
            patch_owners=tuple(dict.fromkeys((tenant, DYNAMIC_TENANT))) if shared else (tenant,),
            parts=parts,
        )
