"""Records on disk: one Arrow IPC file each, memory-mappable, self-checking, never pickle.

    Arrow IPC file
      schema metadata  "orbitserve.record"  JSON: format, kind, key, fingerprint, tenant, content, antecedents, layout,
                                            dtype, parts (name, shape per layer), layers, created, layer digests, ...
                       "orbitserve.seal"    fixed-width text: where the layers' bytes lie, and the frame digest
      record batch i   one flat column with layer i's numbers (bf16 as uint16)

Every byte is covered by BLAKE3: a layer's numbers by that layer's digest, everything else (metadata, Arrow framing,
padding, footer) by the frame digest, which leaves out its own digits. The frame is checked before Arrow
parses anything, so damaged bytes never reach a parser. All record batches have the same size, so the layers lie at a
constant stride and the KV is ONE [layers, tokens, features] view of the mapped file.

The views are read-only memory: writing into them ends the process. Use `out=` of the operator to write elsewhere.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from blake3 import blake3
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from kvstore.basis import SharedBasis
from kvstore.errors import CorruptRecord, ShapeMismatch
from kvstore.layout import Layout
from kvstore.patch import Patch, PatchKind

FORMAT_VERSION = 1
RecordKind = Literal["canonical", "patch", "embedding", "basis"]
ReadThrough = Callable[[int, int], Iterable[memoryview]]

_ARROW_TYPES = {torch.float32: pa.float32(), torch.float16: pa.float16(), torch.bfloat16: pa.uint16()}
_DTYPE_NAMES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_RECORD_KEY, _SEAL_KEY = b"orbitserve.record", b"orbitserve.seal"
# JSON escapes every quote inside a string, so this text cannot occur in the record's JSON.
_SEAL_MARK = b'"orbit-seal"="'
_SEAL = re.compile(re.escape(_SEAL_MARK) + rb"(\d{20}) (\d{20}) (\d{20}) (\d{10}) ([0-9a-f]{64})\"")
_BLANK = "0" * 64
_DIGEST_END = 65  # the digest and the closing quote end the seal
_THREADED_BYTES = 4 << 20  # hashing gains from a second thread above about this size
_hashers = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="kvstore-hash")


@dataclass(frozen=True, eq=False, kw_only=True)
class _Record:
    """What every record carries.

    `key`: 64 hex digits; `fingerprint`: of model and processor; `tenant`: who may read it; `content`: content id of
    the chunk it was derived from; `antecedents`: content ids it was conditioned on; `recompute_seconds`: what a miss
    would cost (eviction weighs it); `created`: Unix seconds; `meta`: anything JSON the owner wants back.
    """

    key: str
    fingerprint: str
    tenant: str
    content: str = ""
    antecedents: tuple[str, ...] = ()
    recompute_seconds: float = 0.0
    created: float = field(default_factory=time.time)
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, kw_only=True)
class CanonicalRecord(_Record):
    """KV(B|∅): `kv` [layers, tokens, features] with keys at base position 0; `token_ids` of the chunk, if known."""

    layout: Layout
    kv: Tensor
    token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        self.layout.check(self.kv)
        if self.token_ids is not None and len(self.token_ids) != self.kv.shape[1]:
            raise ShapeMismatch(f"{len(self.token_ids)} token ids for {self.kv.shape[1]} tokens")

    @property
    def nbytes(self) -> int:
        return self.kv.nbytes


@dataclass(frozen=True, eq=False, kw_only=True)
class PatchRecord(_Record):
    """A patch of the canonical with key `canonical`, formed behind the antecedents with key `antecedent`.

    A patch on a shared basis is stored without the basis' directions, and read back unbound (`Patch.bind`).
    """

    layout: Layout
    patch: Patch
    canonical: str = ""
    antecedent: str = ""

    @property
    def nbytes(self) -> int:
        return self.patch.nbytes


@dataclass(frozen=True, eq=False, kw_only=True)
class EmbeddingRecord(_Record):
    """A chunk's vision embeddings [tokens, hidden] (Qwen3-VL: hidden · (1 + deepstack levels) columns)."""

    embeddings: Tensor

    @property
    def nbytes(self) -> int:
        return self.embeddings.nbytes


@dataclass(frozen=True, eq=False, kw_only=True)
class BasisRecord(_Record):
    """A shared basis of the model, under its version as key. It belongs to no tenant: `tenant` is empty."""

    layout: Layout
    basis: SharedBasis

    def __post_init__(self) -> None:
        self.basis.check(self.layout)

    @property
    def nbytes(self) -> int:
        return self.basis.nbytes


Record: TypeAlias = CanonicalRecord | PatchRecord | EmbeddingRecord | BasisRecord


def kind_of(record: Record) -> RecordKind:
    """The record's kind as the library and its paths name it."""
    if isinstance(record, CanonicalRecord):
        return "canonical"
    if isinstance(record, BasisRecord):
        return "basis"
    return "patch" if isinstance(record, PatchRecord) else "embedding"


@dataclass(frozen=True)
class _Seal:
    """Where the layers' bytes lie in the file, and the digest of all other bytes."""

    first: int  # offset of layer 0
    stride: int  # from one layer's first byte to the next one's
    size: int  # bytes of a layer
    layers: int
    digest: str

    def text(self) -> bytes:
        numbers = f"{self.first:020d} {self.stride:020d} {self.size:020d} {self.layers:010d} {self.digest}"
        return _SEAL_MARK + numbers.encode() + b'"'

    @property
    def end(self) -> int:
        return self.first + (self.layers - 1) * self.stride + self.size

    def spans(self) -> list[tuple[int, int]]:
        starts = (self.first + layer * self.stride for layer in range(self.layers))
        return [(start, start + self.size) for start in starts]


def encode_parts(record: Record) -> list[pa.Buffer]:
    """The record as the bytes of one file, in pieces to be written one after another.

    A layer that lies contiguous on the host is not copied: its piece is a view of the record's tensor. Raises
    ShapeMismatch for a dtype that the format does not store.
    """
    parts = _parts_of(record)
    dtype = next(iter(parts.values())).dtype
    if dtype not in _ARROW_TYPES or any(part.dtype != dtype for part in parts.values()):
        raise ShapeMismatch(f"cannot store {[str(part.dtype) for part in parts.values()]}: one of {list(_DTYPE_NAMES)}")
    layers = [_layer_bytes(list(parts.values()), layer) for layer in range(next(iter(parts.values())).shape[0])]
    document = _document_of(record) | {
        "format": FORMAT_VERSION,
        "kind": kind_of(record),
        "dtype": str(dtype).removeprefix("torch."),
        "parts": [[name, list(part.shape[1:])] for name, part in parts.items()],
        "layers": len(layers),
        "digests": _digests(layers),
    }
    metadata = {_RECORD_KEY: json.dumps(document).encode(), _SEAL_KEY: _Seal(0, 0, 0, len(layers), _BLANK).text()}
    bodies = [pa.py_buffer(layer) for layer in layers]
    frame = _write(bodies, _ARROW_TYPES[dtype], metadata)
    _fill_seals(frame, bodies)
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
) -> Record:
    """The record in `buffer`, its tensors zero-copy views of it. Raises CorruptRecord if anything is not as expected.

    `verify=False` skips the layers' digests (the frame, a few KiB, is always checked). `read(start, end)` yields the
    same bytes where that is faster than going through `buffer`.
    """
    buffer = buffer if isinstance(buffer, pa.Buffer) else pa.py_buffer(buffer)
    seal = _check_frame(buffer)
    document = _read_document(buffer)
    expected = {"key": expect_key, "fingerprint": expect_fingerprint, "tenant": expect_tenant}
    for name, value in expected.items():
        if document.get(name) != value:
            raise CorruptRecord(f"the record's {name} is not the one expected")
    try:
        if verify:
            _check_layers(buffer, read, seal, document["digests"])
        return _build(document, _views(buffer, seal, document))
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
        raise CorruptRecord(f"the record's metadata is inconsistent: {error}") from error


def read_metadata(buffer: pa.Buffer | bytes) -> dict[str, Any]:
    """The record's JSON document, after checking the frame. Reads no tensor bytes. Raises CorruptRecord."""
    buffer = buffer if isinstance(buffer, pa.Buffer) else pa.py_buffer(buffer)
    _check_frame(buffer)
    return _read_document(buffer)


def layer_checks(buffer: pa.Buffer | bytes) -> list[tuple[str, bool]]:
    """Every layer's recorded checksum and whether its bytes match. Raises CorruptRecord if the frame is damaged."""
    buffer = buffer if isinstance(buffer, pa.Buffer) else pa.py_buffer(buffer)
    seal, view = _check_frame(buffer), memoryview(buffer)
    digests = _read_document(buffer)["digests"]
    found = (blake3(view[start:end], max_threads=blake3.AUTO).hexdigest() for start, end in seal.spans())
    return [(digest, digest == actual) for digest, actual in zip(digests, found, strict=True)]


# Writing


def _parts_of(record: Record) -> dict[str, Tensor]:
    """The record's tensors, each [layers, ...], in file order."""
    if isinstance(record, CanonicalRecord):
        return {"kv": record.kv}
    if isinstance(record, EmbeddingRecord):
        return {"embeddings": record.embeddings.unsqueeze(0)}
    names = [segment.name for segment in record.layout.segments]
    if isinstance(record, BasisRecord):
        return {f"right.{name}": part for name, part in zip(names, record.basis.directions, strict=True)}
    factors = {}
    for index, name in enumerate(names):
        factors[f"left.{name}"] = record.patch.left[index]
        if record.patch.basis is None:
            factors[f"right.{name}"] = record.patch.right[index]
    return factors


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
    elif isinstance(record, PatchRecord):
        patch = record.patch
        document |= {
            "layout": record.layout.to_json(),
            "canonical": record.canonical,
            "antecedent": record.antecedent,
            "patch": {
                "kind": str(patch.kind),
                "rank": patch.rank,
                "energy": list(patch.energy),
                "first_layer": patch.first_layer,
                "basis": patch.basis,
            },
        }
    elif isinstance(record, BasisRecord):
        document |= {"layout": record.layout.to_json(), "first_layer": record.basis.first_layer}
    return document


def _layer_bytes(parts: Sequence[Tensor], layer: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """One layer of all parts as flat contiguous bytes on the host; a view where the parts allow it."""
    flat = [part[layer].detach().cpu().contiguous().view(-1).view(torch.uint8) for part in parts]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).numpy()


class _Frame:
    """A file for Arrow to write into. It keeps everything but the layers' bodies, which stay where they are."""

    closed = False

    def __init__(self, bodies: Sequence[pa.Buffer]) -> None:
        self._bodies = {body.address for body in bodies}
        self.gaps = [bytearray()]  # gaps[i] goes before the body of layer i, the last one after all of them
        self.starts: list[int] = []  # where in the file each body begins
        self.size = 0

    def write(self, data: pa.Buffer | bytes) -> int:
        nbytes = len(memoryview(data))
        if isinstance(data, pa.Buffer) and data.address in self._bodies:
            self.starts.append(self.size)
            self.gaps.append(bytearray())
        else:
            self.gaps[-1] += data
        self.size += nbytes
        return nbytes

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """Nothing is held."""


def _write(bodies: Sequence[pa.Buffer], arrow_type: pa.DataType, metadata: dict[bytes, bytes]) -> _Frame:
    """The Arrow file around the layers' bodies, its seal still empty."""
    schema = pa.schema([pa.field("layer", arrow_type, nullable=False)], metadata=metadata)
    count = bodies[0].size // (arrow_type.bit_width // 8)
    frame = _Frame(bodies)
    with pa.PythonFile(frame, mode="w") as sink, pa.ipc.new_file(sink, schema) as writer:
        for body in bodies:
            column = pa.Array.from_buffers(arrow_type, count, [None, body])
            writer.write_batch(pa.record_batch([column], schema=schema))
    return frame


def _fill_seals(frame: _Frame, bodies: Sequence[pa.Buffer]) -> None:
    """Fills in both copies of the seal: Arrow repeats the schema in the footer."""
    starts, size = frame.starts, bodies[0].size
    stride = starts[1] - starts[0] if len(starts) > 1 else size
    if len(starts) != len(bodies) or any(start != starts[0] + i * stride for i, start in enumerate(starts)):
        raise ShapeMismatch("record batches of equal size were laid out at unequal strides")
    blank = _Seal(starts[0], stride, size, len(bodies), _BLANK).text()
    head, *middle, foot = (memoryview(gap) for gap in frame.gaps)
    places = []
    for gap, view in ((frame.gaps[0], head), (frame.gaps[-1], foot)):
        place = gap.find(_SEAL_MARK)
        view[place : place + len(blank)] = blank
        places.append(place + len(blank) - _DIGEST_END)
    (in_head, in_foot) = places
    around = [head[:in_head], head[in_head + 64 :], *middle, foot[:in_foot], foot[in_foot + 64 :]]
    digest = _frame_digest(around, frame.size).encode()
    head[in_head : in_head + 64] = foot[in_foot : in_foot + 64] = digest


# Checking


def _digest(chunks: Iterable[Any]) -> str:
    hasher = blake3()
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.hexdigest()


def _digests(layers: Sequence[Any]) -> list[str]:
    """The digests of layers in memory; several at once where that pays."""
    alone = ([layer] for layer in layers)
    many = sum(memoryview(layer).nbytes for layer in layers) >= _THREADED_BYTES
    return list(_hashers.map(_digest, alone) if many else map(_digest, alone))


def _seal_places(buffer: pa.Buffer, seal: _Seal) -> tuple[int, int]:
    """Offsets of the two copies of the seal: Arrow repeats the schema in the footer. Raises CorruptRecord."""
    view = memoryview(buffer)
    before = bytes(view[: seal.first]).find(_SEAL_MARK)
    after = bytes(view[seal.end :]).find(_SEAL_MARK)
    if before < 0 or after < 0:
        raise CorruptRecord("the record's seal is missing")
    return before, seal.end + after


def _frame_digest(around: Iterable[memoryview], size: int) -> str:
    """BLAKE3 over the file's size and `around`: all its bytes but the layers' and the digits of the seals' digests."""
    hasher = blake3(derive_key_context="orbitserve 2026 record frame v1")
    hasher.update(size.to_bytes(8, "little"))
    for part in around:
        hasher.update(part)
    return hasher.hexdigest()


def _around(view: memoryview, seal: _Seal, places: tuple[int, int]) -> Iterator[memoryview]:
    """What the frame digest covers, of a whole file whose seals are at `places`."""
    digits = len(seal.text()) - _DIGEST_END
    position = 0
    for start, end in sorted([*((place + digits, place + digits + 64) for place in places), *seal.spans()]):
        yield view[position:start]
        position = end
    yield view[position:]


_HEAD_BYTES = 1 << 16


def _check_frame(buffer: pa.Buffer) -> _Seal:
    """Finds the seal, checks the frame against it. Raises CorruptRecord."""
    view = memoryview(buffer)
    match = _SEAL.search(bytes(view[:_HEAD_BYTES])) or _SEAL.search(view)
    if match is None:
        raise CorruptRecord("not a record of this format, or its start is damaged")
    first, stride, size, layers = (int(number) for number in match.groups()[:4])
    seal = _Seal(first, stride, size, layers, match.group(5).decode())
    if layers < 1 or size < 1 or stride < size or match.end() > first or seal.end > len(view):
        raise CorruptRecord("the record is truncated or its seal is damaged")
    places = _seal_places(buffer, seal)
    if any(bytes(view[place : place + len(seal.text())]) != seal.text() for place in places):
        raise CorruptRecord("the record's seals differ")
    if _frame_digest(_around(view, seal, places), len(view)) != seal.digest:
        raise CorruptRecord("the record's frame does not match its checksum")
    return seal


def _read_document(buffer: pa.Buffer) -> dict[str, Any]:
    """The JSON document of a file whose frame was checked."""
    try:
        document = json.loads(pa.ipc.open_file(buffer).schema.metadata[_RECORD_KEY])
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        raise CorruptRecord(f"the record's metadata cannot be read: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT_VERSION:
        raise CorruptRecord(f"the record is not of format version {FORMAT_VERSION}")
    return document


def _check_layers(buffer: pa.Buffer, read: ReadThrough | None, seal: _Seal, digests: Sequence[str]) -> None:
    if len(digests) != seal.layers:
        raise CorruptRecord("the record does not list one checksum per layer")
    view = memoryview(buffer)
    if read is None:
        found = _digests([view[start:end] for start, end in seal.spans()])
    else:
        found = [_digest(read(start, end)) for start, end in seal.spans()]
    for layer, (digest, expected) in enumerate(zip(found, digests, strict=True)):
        if digest != expected:
            raise CorruptRecord(f"layer {layer} does not match its checksum")


# Reading


def _views(buffer: pa.Buffer, seal: _Seal, document: Mapping[str, Any]) -> dict[str, Tensor]:
    """Every part as a view [layers, ...] of the buffer: one layer's numbers after another, at a constant stride."""
    dtype = _DTYPE_NAMES[document["dtype"]]
    width = dtype.itemsize
    shapes = {name: tuple(int(n) for n in shape) for name, shape in document["parts"]}
    if sum(math.prod(shape) for shape in shapes.values()) * width != seal.size or seal.layers != document["layers"]:
        raise ValueError("the parts do not fill the layers")
    if seal.first % width or seal.stride % width:
        raise ValueError("the layers are not aligned to their numbers")
    # DLPack carries a read-only Arrow buffer into torch without a copy and keeps it alive.
    count = (seal.end - seal.first) // width
    window = buffer.slice(seal.first, count * width)
    storage_type = pa.uint16() if dtype is torch.bfloat16 else _ARROW_TYPES[dtype]
    numbers = from_dlpack(pa.Array.from_buffers(storage_type, count, [None, window])).view(dtype)
    parts, offset = {}, 0
    for name, shape in shapes.items():
        inner = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        strides = (seal.stride // width, *inner)
        parts[name] = numbers.as_strided((seal.layers, *shape), strides, offset)
        offset += math.prod(shape)
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
    layout = Layout.from_json(document["layout"])
    if kind == "canonical":
        token_ids = document["token_ids"]
        ids = None if token_ids is None else tuple(int(token) for token in token_ids)
        return CanonicalRecord(**common, layout=layout, kv=parts["kv"], token_ids=ids)
    names = [segment.name for segment in layout.segments]
    if kind == "basis":
        basis = SharedBasis(tuple(parts[f"right.{name}"] for name in names), int(document["first_layer"]))
        return BasisRecord(**common, layout=layout, basis=basis)
    if kind != "patch":
        raise ValueError(f"unknown record kind {kind!r}")
    described = document["patch"]
    shared = described.get("basis")
    patch = Patch(
        kind=PatchKind(described["kind"]),
        rank=int(described["rank"]),
        left=tuple(parts[f"left.{name}"] for name in names),
        right=() if shared else tuple(parts[f"right.{name}"] for name in names),
        energy=tuple(float(share) for share in described["energy"]),
        first_layer=int(described["first_layer"]),
        basis=shared,
    )
    keys = {"canonical": document["canonical"], "antecedent": document["antecedent"]}
    return PatchRecord(**common, layout=layout, patch=patch, **keys)
