"""Records on disk: one Arrow IPC file each, laid out for views, self-checking, never pickle.

    Arrow IPC file
      schema metadata  "orbitserve.record"  JSON: format, kind, key, fingerprint, tenant, content, antecedents, layout,
                                            parts (name, shape per layer, dtype), layers, created, layer digests, ...
                       "orbitserve.seal"    fixed-width text: where the layers' bytes lie, and the frame digest
      record batch i   one flat column with layer i's numbers (bf16 as uint16; bytes where a record has several dtypes)

Every byte is covered by BLAKE3: a layer's numbers by that layer's digest, everything else (metadata, Arrow framing,
padding, footer) by the frame digest, which leaves out its own digits. The frame is checked before Arrow
parses anything, so damaged bytes never reach a parser. All record batches have the same size, so the layers lie at a
constant stride and the KV is ONE [layers, tokens, features] view of the file's bytes. A patch has as many directions in
a layer as are worth it, so it is one batch as a whole, and its factors are views likewise.

The views are shared by all readers: never write into them. Use `out=` of the operator to write elsewhere.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from blake3 import blake3
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from kvstore.errors import CorruptRecord, ShapeMismatch
from kvstore.operator.basis import SharedBasis
from kvstore.operator.directions import Directions
from kvstore.operator.layout import Layout
from kvstore.operator.patch import Patch, PatchKind
from kvstore.records.record import (
    BasisRecord,
    CanonicalRecord,
    EmbeddingRecord,
    PatchRecord,
    Record,
    SegmentPatchRecord,
    SegmentRecord,
    SessionRecord,
    kind_of,
)
from kvstore.records.seal import Frame, ReadThrough, Seal, blank_seal, check_frame, fill_seals, find_seal, read_all

FORMAT_VERSION = 2  # records of any other are corrupt
# Told a record whose layers still come in, how many of them are there and checked, and how many it has.
Arrived = Callable[["Record", int, int], object]

_ARROW_TYPES = {
    torch.float32: pa.float32(), torch.float16: pa.float16(), torch.bfloat16: pa.uint16(), torch.int8: pa.int8(),
}  # fmt: skip
_DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in _ARROW_TYPES}
_RECORD_KEY, _SEAL_KEY = b"orbitserve.record", b"orbitserve.seal"
_MAGIC = 8  # bytes before the schema: "ARROW1", padded
_THREADED_BYTES = 4 << 20  # hashing gains from a second thread above about this size
_hashers = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="kvstore-hash")


def is_finite(record: Record) -> bool:
    """True if the record's tensors hold neither NaN nor infinities."""
    parts = (part for part in _parts_of(record).values() if part.is_floating_point() and part.numel())
    return all(bool(torch.stack(part.aminmax()).isfinite().all()) for part in parts)


def encode_parts(record: Record) -> list[pa.Buffer]:
    """Encode the record as one file, in pieces to be written one after another.

    A layer that lies contiguous on the host is not copied: its piece is a view of the record's tensor. Raises
    ShapeMismatch for a dtype that the format does not store.
    """
    parts = _parts_of(record)
    dtypes = {part.dtype for part in parts.values()}
    if not dtypes <= _ARROW_TYPES.keys():
        raise ShapeMismatch(f"cannot store {[str(part.dtype) for part in parts.values()]}: one of {list(_DTYPE_NAMES)}")
    arrow_type = _ARROW_TYPES[dtypes.pop()] if len(dtypes) == 1 else pa.uint8()
    layers = [_layer_bytes(list(parts.values()), layer) for layer in range(next(iter(parts.values())).shape[0])]
    document = _document_of(record) | {
        "format": FORMAT_VERSION,
        "kind": kind_of(record),
        "parts": [[name, list(part.shape[1:]), str(part.dtype).removeprefix("torch.")] for name, part in parts.items()],
        "layers": len(layers),
        "digests": [_digest([layer]) for layer in layers],  # in the background: one thread is enough
    }
    metadata = {_RECORD_KEY: json.dumps(document).encode(), _SEAL_KEY: blank_seal(len(layers))}
    bodies = [pa.py_buffer(layer) for layer in layers]
    frame = _write(bodies, arrow_type, metadata)
    fill_seals(frame, bodies)
    first, *others = (pa.py_buffer(gap) for gap in frame.gaps)
    return [first, *chain.from_iterable(zip(bodies, others, strict=True))]


def encode(record: Record) -> pa.Buffer:
    """`encode_parts` joined into one buffer."""
    return pa.py_buffer(b"".join(memoryview(piece) for piece in encode_parts(record)))


def decode(
    buffer: pa.Buffer | bytes,
    *,
    expect_key: str,
    expect_fingerprint: str,
    expect_tenant: str,
    verify: bool = True,
    read: ReadThrough | None = None,
    arrived: Arrived | None = None,
) -> Record:
    """The record in `buffer`, its tensors zero-copy views of it.

    Raises CorruptRecord if anything is not as expected.

    Args:
        verify: False skips the layers' digests (the frame, a few KiB, is always checked).
        read: `read(start, end)` yields the same bytes, where that is faster than going through `buffer`, or where
            `buffer` is still being filled: a byte of it counts once `read` has yielded it.
        arrived: called after each layer of a `read`, in order, with the record that `decode` will return. Its layers so
            far match their checksums. What lists the checksums is checked last: until `decode` returns, a caller
            that uses such a layer must be ready to discard the result.
    """
    buffer = buffer if isinstance(buffer, pa.Buffer) else pa.py_buffer(buffer)
    expected = {"key": expect_key, "fingerprint": expect_fingerprint, "tenant": expect_tenant}
    try:
        # The layers come before the frame, which touches the file at many places: a cold file is read in order, once.
        if read is None:
            seal = find_seal(buffer)
            digests = _layer_digests(buffer, seal) if verify else None
            check_frame(buffer, seal)
            document = _read_document(buffer, expected)
            if digests is not None:
                _compare(digests, document["digests"])
            return _build(document, _views(buffer, seal, document))
        seal = find_seal(buffer, read)
        document = _read_document(buffer, expected, head=seal.first)
        views = _views(buffer, seal, document)
        record = _build(document, views)
        done = seal.first
        for layer, (start, end) in enumerate(seal.spans()):
            read_all(read, done, start)  # what Arrow writes between layers is part of the frame
            done = end
            if verify:
                _compare([_digest(read(start, end))], document["digests"][layer : layer + 1], layer)
            else:
                read_all(read, start, end)
            if arrived is not None:
                arrived(record, layer + 1, seal.layers)
        read_all(read, done, buffer.size)
        check_frame(buffer, seal)
        return record
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise CorruptRecord(f"the record's metadata is inconsistent: {error}") from error


def read_metadata(buffer: pa.Buffer | bytes) -> dict[str, Any]:
    """The record's JSON document, after checking the frame; reads no tensor bytes.

    Raises CorruptRecord.
    """
    buffer = buffer if isinstance(buffer, pa.Buffer) else pa.py_buffer(buffer)
    check_frame(buffer, find_seal(buffer))
    return _read_document(buffer, {})


def layer_checks(buffer: pa.Buffer | bytes) -> list[tuple[str, bool]]:
    """Recorded checksum of every layer, and whether its bytes match.

    Raises CorruptRecord if the frame is damaged.
    """
    buffer = buffer if isinstance(buffer, pa.Buffer) else pa.py_buffer(buffer)
    seal, view = find_seal(buffer), memoryview(buffer)
    check_frame(buffer, seal)
    digests = _read_document(buffer, {})["digests"]
    found = (blake3(view[start:end], max_threads=blake3.AUTO).hexdigest() for start, end in seal.spans())
    return [(digest, digest == actual) for digest, actual in zip(digests, found, strict=True)]


# Writing


def _parts_of(record: Record) -> dict[str, Tensor]:
    """The record's tensors, each [layers, ...], in file order."""
    if isinstance(record, CanonicalRecord | SegmentRecord):
        return {"kv": record.kv}
    if isinstance(record, SessionRecord):
        return {"manifest": torch.frombuffer(bytearray(record.manifest), dtype=torch.int8).unsqueeze(0)}
    if isinstance(record, EmbeddingRecord):
        return {"embeddings": record.embeddings.unsqueeze(0)}
    names = [segment.name for segment in record.layout.segments]
    if isinstance(record, BasisRecord):
        return {f"right.{name}": part for name, part in zip(names, record.basis.directions, strict=True)}
    stored = dict(zip(names, record.patch.unbound.segments, strict=True))
    factors = {f"scale.{name}": part.scale for name, part in stored.items()}  # first: they are aligned to 4 bytes
    factors |= {f"left.{name}": part.weighted_left for name, part in stored.items()}
    factors |= {f"right.{name}": part.right for name, part in stored.items() if part.right is not None}
    return {name: factor.unsqueeze(0) for name, factor in factors.items()}


def _document_of(record: Record) -> dict[str, Any]:
    document: dict[str, Any] = {
        "key": record.key,
        "fingerprint": record.fingerprint,
        "tenant": record.tenant,
        "content": record.content,
        "antecedents": list(record.antecedents),
        "recompute_seconds": record.recompute_seconds,
        "created": record.created,
        "meta": dict(record.meta),
    }
    if isinstance(record, CanonicalRecord):
        document |= {"layout": record.layout.to_json(), "token_ids": record.token_ids}
    elif isinstance(record, SegmentRecord):
        document |= {"layout": record.layout.to_json(), "at": record.at}
    elif isinstance(record, SegmentPatchRecord):
        document |= {"layout": record.layout.to_json(), "patch": _described(record.patch)}
    elif isinstance(record, PatchRecord):
        document |= {
            "layout": record.layout.to_json(),
            "canonical": record.canonical,
            "antecedent": record.antecedent,
            "prefix": record.prefix,
            "patch": _described(record.patch),
        }
    elif isinstance(record, BasisRecord):
        document |= {"layout": record.layout.to_json(), "first_layer": record.basis.first_layer}
    return document


def _described(patch: Patch) -> dict[str, Any]:
    return {
        "kind": str(patch.kind),
        "rank": patch.rank,
        "ranks": [list(part.ranks) for part in patch.segments],
        "energy": list(patch.energy),
        "first_layer": patch.first_layer,
        "basis": patch.basis,
    }


def _layer_bytes(parts: Sequence[Tensor], layer: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """One layer of all parts as flat contiguous host bytes; a view where the parts allow it."""
    flat = [part[layer].detach().cpu().contiguous().view(-1).view(torch.uint8) for part in parts]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).numpy()


def _write(bodies: Sequence[pa.Buffer], arrow_type: pa.DataType, metadata: dict[bytes, bytes]) -> Frame:
    """The Arrow file around the layers' bodies, its seal still empty."""
    schema = pa.schema([pa.field("layer", arrow_type, nullable=False)], metadata=metadata)
    count = bodies[0].size // (arrow_type.bit_width // 8)
    frame = Frame(bodies)
    with pa.PythonFile(frame, mode="w") as sink, pa.ipc.new_file(sink, schema) as writer:
        for body in bodies:
            column = pa.Array.from_buffers(arrow_type, count, [None, body])
            writer.write_batch(pa.record_batch([column], schema=schema))
    return frame


# Checking


def _digest(chunks: Iterable[Any]) -> str:
    hasher = blake3()
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.hexdigest()


def _read_document(buffer: pa.Buffer, expected: Mapping[str, str], head: int | None = None) -> dict[str, Any]:
    """The JSON document of a file, from its checked footer, or from its first `head` bytes.

    Raises CorruptRecord.
    """
    try:
        if head is None:
            schema = pa.ipc.open_file(buffer).schema
        else:
            schema = pa.ipc.read_schema(buffer.slice(_MAGIC, head - _MAGIC))
        document = json.loads(schema.metadata[_RECORD_KEY])
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise CorruptRecord(f"the record's metadata cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise CorruptRecord("the record's metadata is not a JSON object")
    if document.get("format") != FORMAT_VERSION:
        raise CorruptRecord(f"the record is of format version {document.get('format')!r}, not {FORMAT_VERSION}")
    for name, value in expected.items():
        if document.get(name) != value:
            raise CorruptRecord(f"the record's {name} is not the one expected")
    return document


def _layer_digests(buffer: pa.Buffer, seal: Seal) -> list[str]:
    """Digests of the layers' actual bytes."""
    view = memoryview(buffer)
    layers = [[view[start:end]] for start, end in seal.spans()]
    if len(view) >= _THREADED_BYTES:
        try:
            digests = _hashers.map(_digest, layers)
        except RuntimeError:  # the interpreter ends, or no thread can be started: no fault of the record
            pass
        else:
            return list(digests)
    return list(map(_digest, layers))


def _compare(found: Sequence[str], listed: Sequence[str], first: int = 0) -> None:
    """Raise CorruptRecord unless the digests of the layers from `first` on are as listed."""
    if len(found) != len(listed):
        raise CorruptRecord("the record does not list one checksum per layer")
    for layer, (digest, expected) in enumerate(zip(found, listed, strict=True), first):
        if digest != expected:
            raise CorruptRecord(f"layer {layer} does not match its checksum")


# Reading


def _views(buffer: pa.Buffer, seal: Seal, document: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every part as a view [layers, ...] of the buffer, at a constant stride per layer."""
    described = [(name, tuple(map(int, shape)), _DTYPE_NAMES[dtype]) for name, shape, dtype in document["parts"]]
    sizes = [math.prod(shape) * dtype.itemsize for _, shape, dtype in described]
    if sum(sizes) != seal.size or seal.layers != document["layers"]:
        raise ValueError("the parts do not fill the layers")
    # DLPack carries a read-only Arrow buffer into torch without a copy and keeps it alive.
    window = buffer.slice(seal.first, seal.end - seal.first)
    numbers = from_dlpack(pa.Array.from_buffers(pa.uint8(), window.size, [None, window]))
    parts, offset = {}, 0
    for (name, shape, dtype), size in zip(described, sizes, strict=True):
        width = dtype.itemsize
        if seal.first % width or offset % width or (seal.layers > 1 and seal.stride % width):
            raise ValueError("the layers are not aligned to their numbers")
        inner = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        typed = numbers[: len(numbers) - len(numbers) % width].view(dtype)
        parts[name] = typed.as_strided((seal.layers, *shape), (seal.stride // width, *inner), offset // width)
        offset += size
    return parts


def _build(document: Mapping[str, Any], parts: Mapping[str, Tensor]) -> Record:
    common: dict[str, Any] = {
        "key": document["key"],
        "fingerprint": document["fingerprint"],
        "tenant": document["tenant"],
        "content": document["content"],
        "antecedents": tuple(document["antecedents"]),
        "recompute_seconds": float(document["recompute_seconds"]),
        "created": float(document["created"]),
        "meta": document["meta"],
    }
    kind = document["kind"]
    if kind == "embedding":
        return EmbeddingRecord(**common, embeddings=parts["embeddings"][0])
    if kind == "session":
        return SessionRecord(**common, manifest=parts["manifest"][0].numpy().tobytes())
    layout = Layout.from_json(document["layout"])
    if kind == "canonical":
        token_ids = document["token_ids"]
        ids = None if token_ids is None else tuple(int(token) for token in token_ids)
        return CanonicalRecord(**common, layout=layout, kv=parts["kv"], token_ids=ids)
    names = [segment.name for segment in layout.segments]
    if kind == "segment" and "patch" in document:
        return SegmentPatchRecord(**common, layout=layout, patch=_patch(parts, names, document["patch"]))
    if kind == "segment":
        return SegmentRecord(**common, layout=layout, kv=parts["kv"], at=int(document["at"]))
    if kind == "basis":
        basis = SharedBasis(tuple(parts[f"right.{name}"] for name in names), int(document["first_layer"]))
        return BasisRecord(**common, layout=layout, basis=basis)
    if kind != "patch":
        raise ValueError(f"unknown record kind {kind!r}")
    keys = {name: document[name] for name in ("canonical", "antecedent", "prefix")}
    return PatchRecord(**common, layout=layout, patch=_patch(parts, names, document["patch"]), **keys)


def _patch(parts: Mapping[str, Tensor], names: Sequence[str], described: Mapping[str, Any]) -> Patch:
    return Patch(
        kind=PatchKind(described["kind"]),
        rank=int(described["rank"]),
        segments=tuple(_directions(parts, name, index, described) for index, name in enumerate(names)),
        energy=tuple(float(share) for share in described["energy"]),
        first_layer=int(described["first_layer"]),
        basis=described["basis"],
    )


def _directions(parts: Mapping[str, Tensor], name: str, index: int, patch: Mapping[str, Any]) -> Directions:
    """A patch's directions of one segment, as views of the parts."""
    right = parts.get(f"right.{name}")
    ranks = tuple(int(count) for count in patch["ranks"][index])
    return Directions(parts[f"left.{name}"][0], None if right is None else right[0], parts[f"scale.{name}"][0], ranks)
