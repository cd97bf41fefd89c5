"""Identity of a checkpoint. Apart from the engine, so that roles without one can open the model's library."""

from __future__ import annotations

from pathlib import Path

from blake3 import blake3

_SAMPLES = 16
_SAMPLE_BYTES = 64 * 1024


def fingerprint(model: Path) -> str:
    """Digest (64 hex digits) of a checkpoint's configuration and tokenizer (a text chunk's id names text, its KV is of
    tokens), and of name, size and samples of every weight file.

    Sampling keeps the start of a large model fast; 1 MiB spread over each file tells trained weights apart.
    """
    digest = blake3()
    for name in ("config.json", "preprocessor_config.json", "processor_config.json", "tokenizer.json"):
        if (model / name).exists():
            digest.update(name.encode() + (model / name).read_bytes())
    for file in sorted(model.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}:{size}".encode())
        with file.open("rb") as handle:
            for step in range(_SAMPLES):
                handle.seek(step * size // _SAMPLES)
                digest.update(handle.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def precision(dtype: str, cache: str) -> str:
    """What KV was rounded to when it was computed: part of every canonical's key.

    Args:
        dtype: name of the model's dtype. cache: vLLM's name of what the KV pool keeps, or `auto`.
    """
    return dtype if cache in ("auto", dtype) else f"{dtype}/{cache}"
