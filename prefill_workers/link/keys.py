"""Keys under which a request's chunks, and the patches behind them, are stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from kvstore.operator.patch import PatchKind, set_kind
from kvstore.records.keys import DYNAMIC_TENANT, antecedent_key, canonical_key, owner_of
from kvstore.records.patch_form import PatchForm
from prefill_workers.modes import FreeText, Text

if TYPE_CHECKING:
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.protocol import LinkRequest

_TEXT = -1  # no token's id: what follows is a digest of text


@dataclass(frozen=True)
class ChunkKeys:
    """Keys of a chunk's records, and their owners."""

    canonical: str
    context: tuple[int, ...]  # what its patches are keyed by beside antecedents; see `contexts`
    own_patch: str  # behind this list of antecedents
    set_patch: str  # behind this set, in any order
    embedding: str | None  # None: a text chunk
    owner: str  # of canonical KV and embeddings: the request's tenant, or the dynamic library
    patch_owners: tuple[str, ...]  # whose patches serve
    parts: tuple[str, ...] = ()  # patches behind no antecedent and behind each alone; none where no sum may serve
    is_cacheable: bool = True  # whether what is learnt of the chunk where it stands may be kept under these keys

    def all(self) -> list[str]:
        """All keys of the chunk."""
        named = (self.canonical, self.own_patch, self.set_patch, self.embedding, *self.parts)
        return [key for key in named if key is not None]


def contexts(request: LinkRequest, free: FreeText) -> list[tuple[int, ...]]:
    """Per chunk: token ids that key its patches beside the chunks before it, and text's digest.

    That is the fixed prefix and, where `request.text` says so, the text before the chunk: a chunk takes up what stands
    before it, and what a few words add is little, what sentences add is not (`orbitserve bench fidelity`, drift). The
    text goes in as its digest, so that a long conversation is gone through once and not once a chunk.

    | text   | with the fixed prefix                                                                           |
    |--------|-------------------------------------------------------------------------------------------------|
    | auto   | the conversation before the first chunk, if that is longer than `free.before` tokens; the text  |
    |        | between the chunks up to this one, if that or some stretch of this is longer than `free` allows |
    | strict | all text up to this chunk                                                                       |
    | free   | nothing                                                                                         |

    What a request with `free` computes behind long text is not kept as if it were without (`cacheable`).
    """
    found: list[tuple[int, ...]] = []
    text, longest = blake3(derive_key_context="orbitserve 2026 text between chunks v1"), 0
    before = request.words_before
    stop = 0 if request.text is Text.STRICT or not request.chunks else request.chunks[0].start - before
    for i, span in enumerate(request.chunks):
        between = request.token_ids[stop : span.start]
        if i or request.text is Text.STRICT or before > free.before:
            text.update(np.array([len(between), *between], "<i8").tobytes())
        longest = max(longest, len(between)) if i else 0
        if request.text.keys(before, longest, free):
            found.append((*request.prefix, _TEXT, *np.frombuffer(text.digest(), "<i8").tolist()))
        else:
            found.append(request.prefix)
        stop = span.stop
    return found


def cacheable(request: LinkRequest, free: FreeText) -> list[bool]:
    """Per chunk: may KV computed here be cached under these keys?

    False where `text: free` hides long text that would key it otherwise.
    """
    if request.text is not Text.FREE:
        return [True] * len(request.chunks)
    otherwise = contexts(replace(request, text=Text.AUTO), free)
    return [context == request.prefix for context in otherwise]


class Keys:
    """Factory of chunk keys for one engine and one form of patches."""

    def __init__(self, engine: PrefillEngine, form: PatchForm) -> None:
        self._engine, self._form = engine, form

    def of(
        self,
        tenant: str,
        contents: Sequence[str],
        delimiters: Sequence[int],
        context: Sequence[int],
        antecedents: Sequence[str],
        *,
        embeds: bool,
        summed: bool,
        is_cacheable: bool = True,
    ) -> ChunkKeys:
        """Keys of the last of `contents` behind the others, whose canonical keys are `antecedents`.

        Args:
            context: see `contexts`.
            embeds: whether the chunk has vision embeddings.
            summed: whether pair patches behind so many antecedents are summed.
            is_cacheable: see `ChunkKeys`.
        """
        content = contents[-1]
        canonical = canonical_key(self._engine.fingerprint, content, delimiters, self._engine.precision)
        own, of_set = (
            self._form.key(canonical, antecedent_key(context, antecedents, ordered=kind is PatchKind.own), kind)
            for kind in (PatchKind.own, set_kind(len(antecedents)))
        )
        parts: tuple[str, ...] = ()
        different = len({canonical, *antecedents}) > len(antecedents)
        if different and summed:
            alone = [(), *((antecedent,) for antecedent in antecedents)]
            parts = tuple(
                self._form.key(canonical, antecedent_key(context, one, ordered=False), set_kind(len(one)))
                for one in alone
            )  # fmt: skip
        shared = owner_of(tenant, *contents) == DYNAMIC_TENANT
        return ChunkKeys(
            canonical,
            tuple(context),
            own,
            of_set,
            self._engine.embedding_key(content) if embeds else None,
            owner=owner_of(tenant, content),
            patch_owners=tuple(dict.fromkeys((tenant, DYNAMIC_TENANT))) if shared else (tenant,),
            parts=parts,
            is_cacheable=is_cacheable,
        )
