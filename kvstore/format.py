"""Records on disk: one Arrow IPC file each, memory-mappable, self-checking, never pickle.

    Arrow IPC file
      schema metadata  "orbitserve.record"  JSON: format, kind, key, fingerprint, tenant, content, antecedents, layout,
                                            dtype, parts (name, shape per layer), layers, created, layer digests, ...
                       "orbitserve.seal"    fixed-width text: where the layers' bytes lie, and the frame digest
      record batch i   one flat column with layer i's numbers (bf16 as uint16)

Every byte is covered by BLAKE3: a layer's numbers by that layer's digest, everything else (metadata, Arrow framing,
padding, footer) by the frame digest, which is computed with its own digits blanked. The frame is checked before Arrow
parses anything, so damaged bytes never reach a parser. All record batches have the same size, so the layers lie at a
constant stride and the KV is ONE [layers, tokens, features] view of the mapped file.

The views are read-only memory: writing into them ends the process. Use `out=` of the operator to write elsewhere.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
import torch
from blake3 import blake3
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from kvstore.errors import CorruptRecord, ShapeMismatch
from kvstore.layout import Layout
from kvstore.patch import Patch, PatchKind

FORMAT_VERSION = 1
RecordKind = Literal["canonical", "patch", "embedding"]

_ARROW_TYPES = {torch.float32: pa.float32(), torch.float16: pa.float16(), torch.bfloat16: pa.uint16()}
_DTYPE_NAMES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_RECORD_KEY, _SEAL_KEY = b"orbitserve.record", b"orbitserve.seal"
# JSON escapes every quote inside a string, so this text cannot occur in the record's JSON.
_SEAL_MARK = b'"orbit-seal"="'
_SEAL = re.compile(re.escape(_SEAL_MARK) + rb"(\d{20}) (\d{20}) (\d{20}) (\d{10}) ([0-9a-f]{64})\"")
_BLANK = b"0" * 64
_THREADED_BYTES = 4 << 20  # BLAKE3 gains from a second thread above about this size


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
    """A patch of the canonical with key `canonical`, formed behind the antecedents with key `antecedent`."""

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


Record: TypeAlias = CanonicalRecord | PatchRecord | EmbeddingRecord


def kind_of(record: Record) -> RecordKind:
    """The record's kind as the library and its paths name it."""
    if isinstance(record, CanonicalRecord):
        return "canonical"
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


def encode(record: Record) -> pa.Buffer:
    """The record as the bytes of one file. Tensors may be strided or on a device; they are copied once.

    Raises ShapeMismatch for a dtype that the format does not store.
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
        "digests": [_hash(layer).hexdigest() for layer in layers],
    }
    metadata = {_RECORD_KEY: json.dumps(document).encode(), _SEAL_KEY: _Seal(0, 0, 0, len(layers), "0" * 64).text()}
    buffer = _write(layers, _ARROW_TYPES[dtype], metadata)
    return _sealed(buffer, len(layers), layers[0].nbytes)


def decode(
    buffer: pa.Buffer | bytes,
    *,
    expect_key: str,
    expect_fingerprint: str,
    expect_tenant: str,
    verify: bool = True,
) -> Record:
    """The record in `buffer`, its tensors zero-copy views of it. Raises CorruptRecord if anything is not as expected.

    `verify=False` skips the layers' digests (the frame, a few KiB, is always checked).
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
            _check_layers(buffer, seal, document["digests"])
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
    factors = {}
    for index, segment in enumerate(record.layout.segments):
        factors[f"left.{segment.name}"] = record.patch.left[index]
        factors[f"right.{segment.name}"] = record.patch.right[index]
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
            },
        }
    return document


def _layer_bytes(parts: Sequence[Tensor], layer: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """One layer of all parts as flat contiguous bytes on the host; a view where the parts allow it."""
    flat = [part[layer].detach().cpu().contiguous().view(-1).view(torch.uint8) for part in parts]
    return (flat[0] if len(flat) == 1 else torch.cat(flat)).numpy()


def _write(layers: Sequence[np.ndarray[Any, Any]], arrow_type: pa.DataType, metadata: dict[bytes, bytes]) -> pa.Buffer:
    """The Arrow file, in one allocation of exactly its size, without copying the numbers twice."""
    schema = pa.schema([pa.field("layer", arrow_type, nullable=False)], metadata=metadata)
    count = layers[0].nbytes // (arrow_type.bit_width // 8)
    batches = [
        pa.record_batch([pa.Array.from_buffers(arrow_type, count, [None, pa.py_buffer(layer)])], schema=schema)
        for layer in layers
    ]

    def write(sink: pa.NativeFile) -> None:
        with pa.ipc.new_file(sink, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)

    measure = pa.MockOutputStream()
    write(measure)
    buffer = pa.allocate_buffer(measure.size())
    np.frombuffer(buffer, dtype=np.uint8).fill(0)  # padding must not carry whatever the memory held before
    with pa.FixedSizeBufferWriter(buffer) as sink:
        write(sink)
    return buffer


def _sealed(buffer: pa.Buffer, layers: int, size: int) -> pa.Buffer:
    """`buffer` with both copies of its seal filled in."""
    reader = pa.ipc.open_file(buffer)
    starts = [reader.get_batch(i).column(0).buffers()[1].address - buffer.address for i in range(layers)]
    stride = starts[1] - starts[0] if layers > 1 else size
    if any(start != starts[0] + i * stride for i, start in enumerate(starts)):
        raise ShapeMismatch("record batches of equal size were laid out at unequal strides")
    data = np.frombuffer(buffer, dtype=np.uint8)
    blank = _Seal(starts[0], stride, size, layers, _BLANK.decode())
    places = _seal_places(buffer, blank)
    for place in places:
        text = blank.text()
        data[place : place + len(text)] = np.frombuffer(text, dtype=np.uint8)
    digest = _frame_digest(buffer, blank, places)
    for place in places:
        text = _Seal(starts[0], stride, size, layers, digest).text()
        data[place : place + len(text)] = np.frombuffer(text, dtype=np.uint8)
    return buffer


# Checking


def _hash(data: Any) -> Any:
    view = memoryview(data).cast("B")
    threads = blake3.AUTO if len(view) >= _THREADED_BYTES else 1
    return blake3(view, max_threads=threads)


def _seal_places(buffer: pa.Buffer, seal: _Seal) -> tuple[int, int]:
    """Offsets of the two copies of the seal: Arrow repeats the schema in the footer. Raises CorruptRecord."""
    view = memoryview(buffer)
    before = bytes(view[: seal.first]).find(_SEAL_MARK)
    after = bytes(view[seal.end :]).find(_SEAL_MARK)
    if before < 0 or after < 0:
        raise CorruptRecord("the record's seal is missing")
    return before, seal.end + after


def _frame_digest(buffer: pa.Buffer, seal: _Seal, places: tuple[int, int]) -> str:
    """BLAKE3 over all bytes outside the layers, the seals' own digits read as zeros."""
    view = memoryview(buffer)
    digits = len(seal.text()) - 65  # the digest and the closing quote end the seal
    holes = [*((place + digits, place + digits + 64) for place in places), *seal.spans()]
    hasher = blake3(derive_key_context="orbitserve 2026 record frame v1")
    hasher.update(len(view).to_bytes(8, "little"))
    position = 0
    for start, end in sorted(holes):
        hasher.update(view[position:start])
        position = end
    hasher.update(view[position:])
    return hasher.hexdigest()


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
    if _frame_digest(buffer, seal, places) != seal.digest:
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


def _check_layers(buffer: pa.Buffer, seal: _Seal, digests: Sequence[str]) -> None:
    if len(digests) != seal.layers:
        raise CorruptRecord("the record does not list one checksum per layer")
    view = memoryview(buffer)
    for layer, ((start, end), digest) in enumerate(zip(seal.spans(), digests, strict=True)):
        if _hash(view[start:end]).hexdigest() != digest:
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
    if kind != "patch":
        raise ValueError(f"unknown record kind {kind!r}")
    described = document["patch"]
    patch = Patch(
        kind=PatchKind(described["kind"]),
        rank=int(described["rank"]),
        left=tuple(parts[f"left.{segment.name}"] for segment in layout.segments),
        right=tuple(parts[f"right.{segment.name}"] for segment in layout.segments),
        energy=tuple(float(share) for share in described["energy"]),
        first_layer=int(described["first_layer"]),
    )
    names = {"canonical": document["canonical"], "antecedent": document["antecedent"]}
    return PatchRecord(**common, layout=layout, patch=patch, **names)
