"""Beginnings of prompts: found as far as they are known, in a form and frame that serves, and forgotten if deleted."""

from __future__ import annotations

import pytest
from clock import Clock

from prefill_workers.block_index import BlockIndex, ChunkForm, PrefixMatch
from prefill_workers.block_pool import BlockPool, Lease, PoolExhausted
from prefill_workers.modes import OperatingPoint
from prefill_workers.prefix_digests import PrefixChain, marked_beginnings, prefix_chain, prefix_digests
from prefill_workers.protocol import ChunkSpan

BLOCK = 32
EXACT = ChunkForm(OperatingPoint.RECOMPUTED)
PATCHED = ChunkForm(OperatingPoint.PATCHED, "auto", "own 32")
TEXT = list(range(100, 100 + 200))


def chunk(start: int, stop: int, content: str = "image") -> ChunkSpan:
    return ChunkSpan(content, "image", start, stop, start + 1, stop - start - 2)


def chain(tokens: list[int], *chunks: ChunkSpan, tenant: str = "acme") -> PrefixChain:
    return prefix_chain(tenant, tokens, chunks, BLOCK)


class Known:
    """An index and its pool; prompts are linked whole, one after the other."""

    def __init__(self, blocks: int = 64, *, relocates: bool = True) -> None:
        self.index = BlockIndex(BLOCK, relocates=relocates)
        self.pool = BlockPool(range(1, blocks + 1), BLOCK, 10, "p", Clock(), self.index)

    def match(self, of: PrefixChain, frame: int = 0, limit: int | None = None, *forms: ChunkForm) -> PrefixMatch:
        allowed = forms or (EXACT, PATCHED)
        return self.index.match(of, frame, of.ends[-1] if limit is None else limit, allowed.__contains__)

    def begin(self, tokens: list[int], of: PrefixChain, frame: int = 0) -> tuple[Lease, PrefixMatch]:
        match = self.match(of, frame)
        return self.pool.allocate(len(tokens) + 1, 1, match), match

    def link(self, tokens: list[int], *chunks: ChunkSpan, forms: tuple[ChunkForm, ...] = (), frame: int = 0) -> Lease:
        of = chain(tokens, *chunks)
        lease, match = self.begin(tokens, of, frame)
        self.pool.end_copying(lease)
        self.index.add(lease.blocks, of, forms or (EXACT,) * len(chunks), match, frame, self.index.epoch)
        self.pool.abandon(lease.id)
        return lease


def test_digests_are_the_same_wherever_else_they_are_taken():
    spans = [chunk(40, 90), chunk(90, 120, "other")]
    assert prefix_digests("acme", TEXT, spans, [64, 128])[1] == prefix_digests("acme", TEXT, spans, [128])[0]
    assert prefix_digests("acme", TEXT, spans, [40]) == prefix_digests("acme", TEXT, [], [40])
    assert prefix_digests("acme", TEXT, spans, [41]) != prefix_digests("acme", TEXT, [], [41])
    assert prefix_digests("acme", TEXT, spans, [128]) != prefix_digests("other", TEXT, spans, [128])


def test_a_prompt_is_found_at_whole_blocks_at_grains_and_at_edges_of_chunks():
    known = Known()
    known.link(TEXT)
    for tokens, found in (([*TEXT[:100], *[0] * 50], 96), ([*TEXT[:63], 0, 0], 48), ([0, *TEXT[1:]], 0), (TEXT, 192)):
        assert known.match(chain(tokens)).tokens == found
    image = chunk(40, 90)
    known.link([*TEXT[:90], 1, 2, 3], image)
    match = known.match(chain([*TEXT[:90], 7, 8, 9], image))
    assert (match.tokens, match.forms) == (90, (EXACT,))
    assert [match.is_shared(i, BLOCK) for i in range(len(match.blocks))] == [True, True, False], "copied: it goes on"


def test_what_is_cut_in_the_middle_of_a_chunk_ends_where_the_chunk_starts():
    known, image = Known(), chunk(40, 150)
    known.link(TEXT, image)
    assert known.match(chain(TEXT, image), 0, 149).tokens == 40
    assert known.match(chain(TEXT, image), 0, 150).tokens == 150


def test_the_same_tokens_of_another_content_are_another_beginning():
    known = Known()
    known.link(TEXT, chunk(40, 90))
    assert known.match(chain(TEXT, chunk(40, 90, "other"))).tokens == 40
    assert known.match(chain(TEXT, chunk(40, 90), tenant="other")).tokens == 0


def test_exact_and_approximate_chains_never_mix():
    known, image, second = Known(), chunk(40, 60), chunk(70, 90, "second")
    known.link(TEXT, image, second, forms=(PATCHED, EXACT))
    of = chain(TEXT, image, second)
    assert known.match(of, 0, None, EXACT).tokens == 40
    assert known.match(of).forms == (PATCHED, EXACT)
    lease = known.pool.allocate(len(TEXT))
    known.index.add(lease.blocks, of, (EXACT, EXACT), PrefixMatch(), 0, known.index.epoch)
    assert known.match(of).forms == (EXACT, EXACT), "of the same length the exact one"
    assert not {*known.match(of, 0, None, PATCHED, EXACT).blocks[2:]} & {*known.match(of, 0, None, PATCHED).blocks}


def test_an_approximate_chain_goes_on_behind_its_own_form_alone():
    known, image, of = Known(), chunk(40, 60), chain(TEXT, chunk(40, 60))
    other = ChunkForm(OperatingPoint.PATCHED, "auto", "orbit 32")
    known.link(TEXT[:64], image, forms=(PATCHED,))
    lease = known.pool.allocate(len(TEXT))
    known.index.add(lease.blocks, of, (other,), PrefixMatch(), 0, known.index.epoch)
    first, last = known.match(of, 0, 64, PATCHED).blocks, known.match(of, 0, None, PATCHED, other)
    assert {block.forms for block in first[1:]} == {(PATCHED,)}
    assert (last.tokens, last.forms) == (192, (other,))
    assert known.match(of, 0, None, PATCHED).tokens == 64


def test_other_frames_are_turned_from_the_block_that_was_computed():
    known = Known()
    computed = known.link(TEXT[:160])
    for frame in (3, 9, 20):
        match = known.match(chain(TEXT), frame)
        assert not any(match.is_shared(i, BLOCK) for i in range(len(match.blocks)))
        assert [block.block for block in match.blocks[:5]] == list(computed.blocks[:5])
        known.link(TEXT, frame=frame)
        assert all(known.match(chain(TEXT), frame).is_shared(i, BLOCK) for i in range(6))
    assert {block.rotations for block in known.match(chain(TEXT), 9).blocks[:5]} == {1}


def test_frames_are_apart_where_relocated_kv_would_be_quantised_again():
    known = Known(relocates=False)
    known.link(TEXT, frame=3)
    assert known.match(chain(TEXT), 4).tokens == 0
    assert known.match(chain(TEXT), 3).tokens == 192


def test_reports_name_the_beginnings_of_the_latest_prompts_and_none_that_is_evicted():
    known, other = Known(20), [5, *TEXT[1:]]
    marks, of_other = ([mark for _, mark in marked_beginnings("acme", text, [])] for text in (TEXT, other))
    for text in (TEXT, other, TEXT):
        version = known.index.marks_version
        known.link(text)
        assert known.index.marks_version > version
    assert known.index.marks(99) == b"".join([*reversed(marks), *reversed(of_other)])
    assert known.index.marks(2) == b"".join(reversed(marks[-2:]))
    known.pool.allocate(14 * BLOCK)
    assert known.index.marks(99) == b"".join(reversed(marks))


def test_a_deleted_content_takes_along_what_stands_behind_it_and_nothing_else():
    known, image = Known(), chunk(40, 90)
    known.link(TEXT, image)
    known.link([0, *TEXT[1:]])
    known.index.forget("image", "other")
    assert known.match(chain(TEXT, image)).tokens == 192
    known.index.forget("image", "acme")
    assert known.match(chain(TEXT, image)).tokens == 32, "one block of text before it"
    assert known.match(chain([0, *TEXT[1:]])).tokens == 192
    assert known.pool.free == known.pool.total


def test_a_link_that_began_before_a_deletion_names_nothing():
    known, image, of = Known(), chunk(40, 90), chain(TEXT, chunk(40, 90))
    epoch, lease = known.index.epoch, known.pool.allocate(len(TEXT))
    known.index.forget(image.content, "acme")
    known.index.add(lease.blocks, of, (EXACT,), PrefixMatch(), 0, epoch)
    assert len(known.index) == 0


def test_blocks_of_a_lease_are_never_evicted_and_of_others_the_ends_go_first():
    known = Known(12)
    known.link(TEXT)
    lease, match = known.begin(TEXT, chain(TEXT))
    assert len(match.blocks) == 6
    assert known.pool.free == 12 - 7
    with pytest.raises(PoolExhausted):
        known.pool.allocate(6 * BLOCK)
    others = known.pool.allocate(5 * BLOCK)
    assert not {*others.blocks} & {*lease.blocks}
    known.pool.abandon(lease.id)
    assert known.match(chain(TEXT)).tokens == 192
    known.pool.allocate(2 * BLOCK)
    assert known.match(chain(TEXT)).tokens == 160


def test_of_a_prompt_that_is_being_computed_whole_blocks_are_known_and_the_rest_once_it_has_ended():
    known, of = Known(), chain(TEXT)
    lease = known.pool.allocate(len(TEXT))
    for tokens, found in ((100, 96), (None, 192)):
        known.index.add(lease.blocks, of, (), PrefixMatch(), 0, known.index.epoch, tokens)
        assert known.match(of).tokens == found
    assert len(known.index) == 6


def test_a_prompt_that_leaves_no_room_for_what_it_would_copy_begins_anew():
    known = Known(10)
    known.link(TEXT)
    turned, same = known.match(chain(TEXT), 5), known.match(chain(TEXT), 0)
    assert known.pool.fits(10 * BLOCK, same)
    assert known.pool.fits(4 * BLOCK, turned)
    assert not known.pool.fits(5 * BLOCK, turned)
