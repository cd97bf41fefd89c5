"""References of the dynamic library: what one tenant's request computes from them serves all, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from rig import Part, Rig

from kvstore.records.keys import DYNAMIC_TENANT, owned_content_id
from prefill_workers.protocol import LinkRequest, PixelsNeeded
from serving.frontend.prompt_segments import Segments

pytestmark = pytest.mark.engine
REFERENCES = (1, 2, 3)


class Tenants:
    """A rig whose images 1 to 3 are references; `points` links as a tenant and says how each chunk was linked."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self._render = rig, rig.render
        rig.render = self.render  # type: ignore[method-assign]

    def render(self, parts: Sequence[Part]) -> Segments:
        segments = self._render(parts)
        shared = {f"{n:064x}": owned_content_id(bytes([n]), DYNAMIC_TENANT) for n in REFERENCES}
        chunks = tuple(replace(chunk, content=shared.get(chunk.content, chunk.content)) for chunk in segments.chunks)
        return replace(segments, chunks=chunks)

    def points(self, tenant: str, parts: Sequence[Part], prefix: tuple[int, ...] = (), mode: str = "auto") -> list[str]:
        return self.rig.link(parts, mode, tenant=tenant, prefix=prefix).points


@pytest.fixture
def tenants(make_rig: Callable[..., Rig]) -> Tenants:
    return Tenants(make_rig())


def test_a_reference_is_encoded_once_for_all_and_an_upload_for_its_tenant(tenants: Tenants) -> None:
    for number, rivals in ((1, ["recomputed"]), (7, ["encoded"])):
        assert tenants.points("acme", ["look: ", number, " what?"]) == ["encoded"]
        assert tenants.points("rival", ["look: ", number, " what?"]) == rivals
    assert tenants.points("third", [1], mode="full-reuse") == ["relocated"]


def test_a_patch_that_has_seen_a_tenants_text_stays_that_tenants(tenants: Tenants) -> None:
    tenants.points("acme", ["the password is 1234. ", 1, " what?"])
    assert tenants.points("acme", ["the password is 1234. ", 1, " what?"]) == ["patched"]
    assert tenants.points("rival", [1, " what?"]) == ["recomputed"]


def test_orbit_patches_of_references_alone_serve_every_tenant(tenants: Tenants) -> None:
    tenants.points("acme", ["secret ", 1, " and ", 2, " what?"])
    assert tenants.points("rival", [2, 1, "?"]) == ["patched", "patched"]


def test_a_tenants_system_prompt_or_image_keeps_orbit_patches_its_own(tenants: Tenants) -> None:
    tenants.points("acme", [1, 2, "?"], prefix=(5, 6, 7))
    assert tenants.points("acme", [2, 1, "?"], prefix=(5, 6, 7)) == ["patched", "patched"]
    assert tenants.points("rival", [2, 1, "?"], prefix=(5, 6, 7)) == ["recomputed", "recomputed"]
    tenants.points("acme", [3, 7, "?"])
    assert tenants.points("acme", [7, 3, "?"]) == ["patched", "patched"]
    assert tenants.points("rival", [7, 3, "?"]) == ["encoded", "recomputed"]


def test_deleting_a_reference_deletes_it_for_every_tenant(tenants: Tenants) -> None:
    for tenant in ("acme", "rival"):
        tenants.points(tenant, ["look: ", 1, 7, " what?"])
    library = tenants.rig.library
    library.delete_content(owned_content_id(bytes([1]), DYNAMIC_TENANT), DYNAMIC_TENANT)
    segments = tenants.render(["look: ", 1, 7, " what?"])
    for tenant in ("acme", "rival"):
        with pytest.raises(PixelsNeeded) as needed:
            tenants.rig.linker.plan(LinkRequest("test", segments.token_ids, segments.chunks, tenant=tenant))
        assert needed.value.chunks == (0,)
