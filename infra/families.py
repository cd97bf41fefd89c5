"""The tested model families; operator tests on real engines run for each of them.

A new family is a line here and a recipe in `infra.checkpoints`; if its attention keeps another kind of KV than the
layouts of `kvstore.operator.layout` describe, also a layout there and its facts in
`prefill_workers.engine.worker_extension`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A model family: its small checkpoint, KV layout, and placeholders in prompts.

    `image` is empty for text models, whose chunks are documents; `video` for models that take none.
    """

    checkpoint: str
    layout: str
    image: str = ""
    video: str = ""
    trust_remote_code: bool = False


_QWEN = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"

FAMILIES = {
    "qwen2_5_vl": Family("qwen2_5_vl-tiny", "gqa", *_QWEN),
    "qwen3_vl": Family("qwen3_vl-tiny", "gqa", *_QWEN),
    "kimi_vl": Family(
        "kimi_vl-tiny",
        "mla",
        "<|media_start|>image<|media_content|><|media_pad|><|media_end|>",
        trust_remote_code=True,  # the processor comes with the checkpoint
    ),
    "llava": Family("llava-tiny", "gqa", "<image>"),
    "qwen2": Family("qwen2-tiny", "gqa"),
    "qwen2-yarn": Family("qwen2-yarn-tiny", "gqa"),
    "qwen2-linear": Family("qwen2-linear-tiny", "gqa"),
    "deepseek_v2": Family("deepseek_v2-tiny", "mla"),
    "deepseek_v2-yarn": Family("deepseek_v2-yarn-tiny", "mla"),
}
