from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvstore_support import (
    FINGERPRINT,
    GQA,
    MLA,
    basis_record,
    canonical,
    embedding_of,
    patch_of,
    random_kv,
    segment_of,
    segment_patch_of,
    session_of,
)

from kvstore.errors import CorruptRecord, ShapeMismatch
from kvstore.operator.patch import PatchKind, form_patch
from kvstore.records import format as record_format
from kvstore.records.format import decode, encode, read_metadata
from kvstore.records.record import (
    BasisRecord,
    CanonicalRecord,
    EmbeddingRecord,
    PatchRecord,
    Record,
    SegmentRecord,
    SessionRecord,
    kind_of,
)

KINDS: dict[str, Callable[[], Record]] = {
    "canonical": canonical,
    "patch": lambda: patch_of(canonical(), ["before"]),
    "int8 patch": lambda: replace(
        patch_of(canonical(), ["before"]),
        patch=form_patch(random_kv(GQA, 5, seed=9), GQA, 2, dtype=torch.int8, spread=True, depth=0.7),
    ),
    "embedding": lambda: embedding_of(canonical()),
    "basis": basis_record,
    "segment": lambda: segment_of(canonical()),
    "segment patch": lambda: segment_patch_of(canonical()),
    "session": lambda: session_of(canonical()),
}
NAMES = {"int8 patch": "patch", "segment patch": "segment"}  # the kinds of which there are several here
kinds = pytest.mark.parametrize("kind", list(KINDS))


def decoded(buffer: pa.Buffer | bytes, record: Record, **options: Any) -> Record:
    return decode(
        buffer,
        expect_key=record.key,
        expect_fingerprint=record.fingerprint,
        expect_tenant=record.tenant,
        **options,
    )


def tensors(record: Record) -> list[torch.Tensor]:
    if isinstance(record, CanonicalRecord | SegmentRecord):
        return [record.kv]
    if isinstance(record, SessionRecord):
        return [torch.tensor(list(record.manifest))]
    if isinstance(record, EmbeddingRecord):
        return [record.embeddings]
    if isinstance(record, BasisRecord):
        return [*record.basis.directions]
    factors = [(part.left, part.scale, part.right) for part in record.patch.segments]
    return [factor for part in factors for factor in part if factor is not None]


def same_bits(a: Record, b: Record) -> bool:
    pairs = list(zip(tensors(a), tensors(b), strict=True))
    return all(x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y) for x, y in pairs)


@kinds
def test_round_trip(kind: str) -> None:
    record = KINDS[kind]()
    back = decoded(encode(record), record)
    assert kind_of(back) == NAMES.get(kind, kind)
    assert same_bits(record, back)
    for name in ("key", "fingerprint", "tenant", "content", "antecedents", "recompute_seconds", "created"):
        assert getattr(back, name) == getattr(record, name), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", [GQA, MLA])
@pytest.mark.parametrize("tokens", [1, 5, 33])
def test_canonical_keeps_bits_layout_tokens_and_meta(dtype: torch.dtype, layout: Any, tokens: int) -> None:
    kv = random_kv(layout, tokens, dtype)
    record = canonical(
        layout=layout, kv=kv, token_ids=tuple(range(tokens)), meta={"grid": [1, 4, 6]}, recompute_seconds=0.25
    )
    back = decoded(encode(record), record)
    assert isinstance(back, CanonicalRecord)
    assert torch.equal(back.kv.view(torch.uint8), kv.view(torch.uint8))
    assert (back.layout, back.token_ids) == (layout, record.token_ids)
    assert (back.meta, back.recompute_seconds) == ({"grid": [1, 4, 6]}, 0.25)


@pytest.mark.parametrize("kind", list(PatchKind))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("spread", [False, True])
def test_patch_keeps_everything(kind: PatchKind, dtype: torch.dtype, spread: bool) -> None:
    patch = form_patch(random_kv(GQA, 7), GQA, rank=3, kind=kind, dtype=dtype, spread=spread)
    record = PatchRecord(
        key="k", fingerprint="f", tenant="t", layout=GQA, patch=patch, canonical="c", antecedent="a", prefix="p",
        antecedents=("x",),
    )  # fmt: skip
    back = decoded(encode(record), record)
    assert isinstance(back, PatchRecord)
    assert same_bits(record, back)
    restored = back.patch
    assert (restored.kind, restored.rank, restored.first_layer) == (kind, patch.rank, patch.first_layer)
    assert restored.energy == patch.energy
    assert [part.ranks for part in restored.segments] == [part.ranks for part in patch.segments]
    assert (back.canonical, back.antecedent, back.prefix, back.antecedents) == ("c", "a", "p", ("x",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_patch_on_a_shared_basis_is_stored_without_it(dtype: torch.dtype) -> None:
    basis = basis_record().basis
    patch = form_patch(random_kv(GQA, 7), GQA, dtype=dtype, basis=basis)
    record = PatchRecord(key="k", fingerprint="f", tenant="t", layout=GQA, patch=patch)
    back = decoded(encode(record), record)
    assert isinstance(back, PatchRecord)
    assert back.patch.basis == basis.version
    assert [part.right for part in back.patch.segments] == [None] * len(GQA.segments)
    assert back.nbytes == record.nbytes == sum(part.left.nbytes + part.scale.nbytes for part in patch.segments)
    assert torch.equal(back.patch.bind(basis).dense(), patch.dense())


def test_basis_keeps_its_version() -> None:
    record = basis_record()
    back = decoded(encode(record), record)
    assert isinstance(back, BasisRecord)
    assert back.basis.version == record.key
    assert back.layout == record.layout


@settings(max_examples=40)
@given(text=st.text(max_size=60), nested=st.dictionaries(st.text(max_size=8), st.text(max_size=30), max_size=3))
def test_any_text_in_names_and_meta_survives(text: str, nested: dict[str, str]) -> None:
    record = canonical(tenant=text, fingerprint=text, content=text, meta={"nested": nested, "text": text})
    assert decoded(encode(record), record).meta == {"nested": nested, "text": text}


@pytest.mark.parametrize("trap", ['"orbit-seal"="', "ARROW1", "orbitserve.seal", "\x00", '"orbit-seal"="' + "0" * 140])
def test_text_that_looks_like_the_format_itself_survives(trap: str) -> None:
    record = canonical(tenant=trap, fingerprint=trap, meta={trap: trap})
    assert decoded(encode(record), record).meta == {trap: trap}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "session"])  # small, and read at once
def test_decoding_copies_nothing(kind: str) -> None:
    record = KINDS[kind]()
    buffer = encode(record)
    for tensor in tensors(decoded(buffer, record)):
        assert buffer.address <= tensor.data_ptr() < buffer.address + buffer.size


def test_mapped_file_becomes_one_view_of_all_layers(tmp_path: Path) -> None:
    record = canonical(tokens=17)
    path = tmp_path / "record.arrow"
    path.write_bytes(encode(record))
    with pa.memory_map(str(path)) as file:
        buffer = file.read_buffer()
    tracemalloc.start()
    back = decoded(buffer, record)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(back, CanonicalRecord)
    assert peak < 300_000
    assert back.kv.stride()[1:] == (GQA.features, 1)
    assert back.kv.stride(0) > 17 * GQA.features  # the layers are apart in the file, and one tensor nonetheless
    del buffer
    path.unlink()
    assert torch.equal(back.kv, record.kv)  # the mapping lives as long as the tensor


def test_any_arrow_reader_sees_one_batch_per_layer() -> None:
    record = canonical(tokens=4)
    reader = pa.ipc.open_file(encode(record))
    assert reader.num_record_batches == GQA.layers
    for layer in range(GQA.layers):
        column = reader.get_batch(layer).column(0)
        assert torch.equal(torch.tensor(column.to_pylist()), record.kv[layer].flatten())
    document = json.loads(reader.schema.metadata[b"orbitserve.record"])
    assert document["kind"] == "canonical"


def test_strided_and_sliced_tensors_are_stored_by_value() -> None:
    kv = random_kv(GQA, 10)[:, 2:7]
    transposed = random_kv(GQA, 5).transpose(0, 1).contiguous().transpose(0, 1)
    for tensor in (kv, transposed):
        record = canonical(kv=tensor)
        assert torch.equal(tensors(decoded(encode(record), record))[0], tensor)


def test_equal_records_have_equal_bytes() -> None:
    assert encode(canonical(created=1.0)) == encode(canonical(created=1.0))


@kinds
@pytest.mark.parametrize("wrong", ["expect_key", "expect_fingerprint", "expect_tenant"])
def test_another_record_than_expected_is_corrupt(kind: str, wrong: str) -> None:
    record = KINDS[kind]()
    expected = {"expect_key": record.key, "expect_fingerprint": FINGERPRINT, "expect_tenant": "acme"}
    with pytest.raises(CorruptRecord) as caught:
        decode(encode(record), **(expected | {wrong: "other"}))
    assert caught.value.code == "corrupt_record"
    assert "acme" not in str(caught.value)


def test_a_patch_in_8_bits_takes_its_bytes_in_the_file_too() -> None:
    deficit, record = random_kv(GQA, 400), patch_of(canonical(tokens=400))
    sizes = {dtype: len(encode(replace(record, patch=form_patch(deficit, GQA, 4, dtype=dtype, spread=True))))
             for dtype in (torch.int8, torch.bfloat16)}  # fmt: skip
    around = 4096  # metadata, framing
    assert sizes[torch.int8] < sizes[torch.bfloat16] / 2 + around


@kinds
@pytest.mark.parametrize("version", [1, 3])
def test_another_version_is_corrupt(kind: str, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    record = KINDS[kind]()
    with monkeypatch.context() as patched:
        patched.setattr(record_format, "FORMAT_VERSION", version)
        foreign = encode(record)
    for read in (None, lambda start, end: iter([memoryview(foreign)[start:end]])):
        with pytest.raises(CorruptRecord, match=f"format version {version}, not 2"):
            decoded(foreign, record, read=read)
    with pytest.raises(CorruptRecord, match=f"format version {version}, not 2"):
        read_metadata(foreign)


@kinds
def test_no_flipped_byte_goes_unnoticed(kind: str) -> None:
    record = KINDS[kind]()
    sound = bytes(encode(record))
    rng = random.Random(0)
    # Both ends in full (framing, metadata, footer), and samples of the middle.
    places = {*range(0, 64), *range(len(sound) - 64, len(sound)), *rng.sample(range(len(sound)), 400)}
    for place in places:
        damaged = bytearray(sound)
        damaged[place] ^= 1 << rng.randrange(8)
        with pytest.raises(CorruptRecord):
            decoded(bytes(damaged), record)


@settings(max_examples=150)
@given(data=st.data())
def test_no_overwritten_span_goes_unnoticed(data: st.DataObject) -> None:
    record = canonical(created=1.0)
    sound = bytes(encode(record))
    start = data.draw(st.integers(0, len(sound) - 1))
    span = data.draw(st.binary(min_size=1, max_size=min(64, len(sound) - start)))
    damaged = sound[:start] + span + sound[start + len(span) :]
    if damaged != sound:
        with pytest.raises(CorruptRecord):
            decoded(damaged, record)


@kinds
def test_truncated_padded_and_foreign_bytes_are_corrupt(kind: str) -> None:
    record = KINDS[kind]()
    sound = bytes(encode(record))
    cuts = [sound[:size] for size in {0, 1, 8, 100, len(sound) // 2, len(sound) - 1, *range(0, len(sound), 997)}]
    for wrong in [*cuts, sound + b"\x00", b"\x00" + sound, sound + sound, b"garbage" * 1000, sound[::-1]]:
        with pytest.raises(CorruptRecord):
            decoded(wrong, record)


def test_unverified_decoding_still_checks_everything_but_the_numbers() -> None:
    record = canonical()
    sound = bytes(encode(record))
    at = sound.find(record.kv[1].numpy().tobytes())
    damaged = bytearray(sound)
    damaged[at + 5] ^= 1
    assert decoded(bytes(damaged), record, verify=False).key == record.key
    with pytest.raises(CorruptRecord, match="layer 1"):
        decoded(bytes(damaged), record)
    damaged = bytearray(sound)
    damaged[40] ^= 1
    with pytest.raises(CorruptRecord):
        decoded(bytes(damaged), record, verify=False)


def test_a_record_is_checked_without_the_threads_that_end_with_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    monkeypatch.setattr(record_format, "_hashers", pool)
    monkeypatch.setattr(record_format, "_THREADED_BYTES", 0)
    record = canonical()
    data = bytearray(encode(record))
    assert same_bits(decoded(bytes(data), record), record)
    data[bytes(data).find(record.kv[1].numpy().tobytes())] ^= 1
    with pytest.raises(CorruptRecord, match="layer 1"):
        decoded(bytes(data), record)


def test_metadata_is_read_without_the_numbers() -> None:
    record = patch_of(canonical(), ["before"])
    document = read_metadata(encode(record))
    assert (document["kind"], document["key"], document["antecedents"]) == ("patch", record.key, ["before"])
    with pytest.raises(CorruptRecord):
        read_metadata(b"")


def test_dtypes_that_the_format_lacks_are_refused() -> None:
    with pytest.raises(ShapeMismatch, match="float64"):
        encode(canonical(kv=random_kv(GQA, 3, torch.float64)))


def test_token_ids_must_match_the_tokens() -> None:
    with pytest.raises(ShapeMismatch):
        canonical(token_ids=(1, 2))
