"""Identity of a checkpoint.

Apart from the engine, so that roles without one can open the model's library.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from blake3 import blake3

from prefill_workers.model_card import measured

_TENSOR_BYTES = 4096  # of a sample
_FILE_SAMPLES = 64
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf")
_CONFIGURATION = (
    "config.json", "preprocessor_config.json", "processor_config.json", "tokenizer.json", "tokenizer.model",
    "tiktoken.model", "tekken.json", "vocab.json", "merges.txt", "*.py",
)  # fmt: skip


def fingerprint(model: Path, load_format: str = "auto") -> str:
    """Digest (64 hex digits) of a checkpoint.

    It covers configuration, tokenizer (a text chunk's id names text, its KV is of tokens) and own code, and of the
    weights their names, sizes and samples.

    Sampling keeps the start of a large model fast. Every tensor is sampled: whoever trains a projector alone has other
    embeddings, and other KV. For vLLM's `load_format` dummy it is of no weights: those are made up, and what is stored
    of them is never taken for the checkpoint's.

    Lazy blocks (`model_card`) are part of it: with them a model computes other KV.

    Raises:
        ValueError: a `.safetensors` file is none.
        BadModelCard: see `model_card.measured`.
    """
    digest = blake3()
    if (card := measured(model)) is not None and card.lazy_blocks:
        digest.update(json.dumps(card.lazy_blocks).encode())
    for file in (file for pattern in _CONFIGURATION for file in sorted(model.glob(pattern))):
        digest.update(file.name.encode() + file.read_bytes())
    if load_format == "dummy":
        digest.update(b"made-up weights")
        return digest.hexdigest()
    safe = sorted(model.glob("*.safetensors"))
    others = [] if safe else sorted(file for pattern in _OTHER_WEIGHTS for file in model.glob(pattern))
    for file, samples in [*((file, _of_tensors) for file in safe), *((file, _of_file) for file in others)]:
        digest.update(f"{file.name}:{file.stat().st_size}".encode())
        for sample in samples(file):
            digest.update(sample)
    return digest.hexdigest()


def _of_tensors(file: Path) -> Iterator[bytes]:
    """A safetensors file's header, and the beginning and the middle of every tensor."""
    size = file.stat().st_size
    with file.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        header = handle.read(length) if length <= size else b""
        try:
            tensors = [tensor for name, tensor in json.loads(header).items() if name != "__metadata__"]
            offsets = sorted(tuple(tensor["data_offsets"]) for tensor in tensors)
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            raise ValueError(f"{file} is no safetensors file") from error
        yield header
        data = handle.tell()
        for start, end in offsets:
            for place in (start, (start + end) // 2):
                handle.seek(data + place)
                yield handle.read(min(_TENSOR_BYTES, end - place))


def _of_file(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    with file.open("rb") as handle:
        for step in range(_FILE_SAMPLES):
            handle.seek(step * size // _FILE_SAMPLES)
            yield handle.read(_TENSOR_BYTES)


def precision(dtype: str, cache: str) -> str:
    """Precision of computed KV: part of every canonical's key.

    Args:
        dtype: name of the model's dtype. cache: vLLM's name of what the KV pool keeps, or `auto`.
    """
    return dtype if cache in ("auto", dtype) else f"{dtype}/{cache}"
