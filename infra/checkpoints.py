"""Reference models for tests, the demo and the benchmarks: random weights in the shape of real families.

`python -m infra.checkpoints NAME|all [--out DIR]` writes them; `checkpoint_path(NAME)` builds on demand. Building takes
seconds, needs no network, and the same recipe gives the same bytes.

The weights are random but not shapeless. Fan-in scaled initialisation keeps every layer's contribution to the residual
stream at the same size, attention is sharp enough that far tokens (images included) change the answer, and the logits
spread by `LOGIT_SPREAD`, so that greedy answers vary and are rarely decided by rounding: for the tiny model the best
token leads by 0.5 in the median, while bf16 moves a logit by 0.008 in the median and by 0.13 at most. Only printable
ASCII tokens have output weights: greedy answers are readable, stream token by token, and end at `max_tokens`.
"""

import argparse
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

DEFAULT_OUT = Path(".orbitserve/checkpoints")
STAMP = "recipe.sha256"

PATCH, MERGE = 14, 2
PIXELS_PER_TOKEN = (PATCH * MERGE) ** 2
MIN_IMAGE_TOKENS, MAX_IMAGE_TOKENS = 4, 2048
DEFAULT_ANSWER_TOKENS = 128  # nothing else ends an answer whose request has no `max_tokens`

ATTENTION_SHARPNESS = 1.6  # standard deviation of q and k features: attention logits spread by its square
LOGIT_SPREAD = 2.5

# The order of Qwen2.5-VL's own added tokens. The last two are ordinary text to the tokenizer's decoder: vLLM's hermes
# tool parser looks for them in the decoded answer.
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
TOOL_TOKENS = ("<tool_call>", "</tool_call>")
CHAT_TEMPLATE = (Path(__file__).parent / "qwen2_5_vl.jinja").read_text()


@dataclass(frozen=True)
class Qwen25VL:
    """Sizes of a Qwen2.5-VL shaped model. Its vision tower has 4 heads and one full-attention layer, the last."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    mrope_section: tuple[int, int, int]
    vision_depth: int
    vision_hidden: int
    context: int = 32768
    rope_theta: float = 10000.0
    seed: int = 0


RECIPES: dict[str, Qwen25VL] = {
    "qwen2_5_vl-tiny": Qwen25VL(
        vocabulary=512, hidden=256, intermediate=512, layers=4, heads=8, kv_heads=2, head_size=32,
        mrope_section=(4, 6, 6), vision_depth=2, vision_hidden=128,
    ),
    # 250M parameters: long prefills cost enough on a CPU for time to first token to mean something.
    "qwen2_5_vl-250m": Qwen25VL(
        vocabulary=8192, hidden=1024, intermediate=3840, layers=16, heads=8, kv_heads=2, head_size=128,
        mrope_section=(16, 24, 24), vision_depth=4, vision_hidden=256,
    ),
}  # fmt: skip


def checkpoint_path(name: str, out: Path = DEFAULT_OUT) -> Path:
    """Folder of the checkpoint `name` under `out`, built first unless a current one is there.

    Raises:
        KeyError: there is no recipe of that name.
    """
    recipe = RECIPES[name]
    target = out / name
    stamp = _stamp(recipe)
    if _is_current(target, stamp):
        return target
    building = out / f"{name}.building"
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    write_qwen2_5_vl(recipe, building)
    (building / STAMP).write_text(stamp)
    shutil.rmtree(target, ignore_errors=True)
    building.rename(target)  # an interrupted build never looks like a finished one
    return target


def _stamp(recipe: Qwen25VL) -> str:
    """Identity of what would be written: the recipe, the chat template and this file."""
    parts = (json.dumps(asdict(recipe)), CHAT_TEMPLATE, Path(__file__).read_text())
    return sha256("\0".join(parts).encode()).hexdigest()


def _is_current(target: Path, stamp: str) -> bool:
    return (target / STAMP).is_file() and (target / STAMP).read_text() == stamp


# -- tokenizer and processor -------------------------------------------------------------------------------------------


def byte_vocabulary(size: int) -> list[str]:
    """`size` token texts in the byte-level alphabet: all single bytes, then made-up syllables.

    Text is encoded byte by byte, since there are no merges; the syllables only make every id decode to text.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    consonants, vowels, space = "bcdfghjklmnprstvwz", "aeiou", "Ġ"
    syllables = ("".join(parts) for parts in product(consonants, vowels, consonants, vowels))
    short = ("".join(parts) for parts in product((space, ""), consonants, vowels))
    for token in (*short, *syllables):
        if len(alphabet) == size:
            break
        alphabet.append(token)
    if len(alphabet) != size:
        raise ValueError(f"no {size} tokens to make a vocabulary of")
    return alphabet


def tokenizer(vocabulary: int) -> "PreTrainedTokenizerFast":
    """Byte-level tokenizer with Qwen2.5-VL's added tokens and `vocabulary` ids in all, every one of which decodes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    plain = byte_vocabulary(vocabulary - len(SPECIAL_TOKENS) - len(TOOL_TOKENS))
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(plain)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOOL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=list(SPECIAL_TOKENS),
        model_max_length=32768,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def printable_tokens(tokens: "PreTrainedTokenizerFast") -> list[int]:
    """Ids whose text is printable ASCII, added tokens excluded."""
    added = set(tokens.get_added_vocab().values())
    return [
        index
        for index in range(len(tokens))
        if index not in added and (text := tokens.decode([index])).isascii() and text.isprintable()
    ]


# -- weights -----------------------------------------------------------------------------------------------------------


def initialise(model: "torch.nn.Module", seed: int, answer_tokens: Sequence[int]) -> None:
    """Draw every weight of a Qwen2.5-VL shaped model from `seed`; see the module's docstring for what they aim at."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    residual_writers = re.compile(r"(o_proj|down_proj|attn\.proj)\.weight$")
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() == 1 and name.endswith("weight"):  # the norms
            parameter.data.fill_(1.0)
            continue
        fan_in = parameter[0].numel() if parameter.dim() > 1 else 1
        scale = 1.0 / math.sqrt(fan_in)
        if name.endswith("bias"):
            scale = 0.1
        elif "embed_tokens" in name:
            scale = 1.0
        elif re.search(r"(q_proj|k_proj|attn\.qkv)\.weight$", name):
            scale *= ATTENTION_SHARPNESS
        elif residual_writers.search(name):
            scale *= 0.7
        elif "lm_head" in name:
            scale *= LOGIT_SPREAD
        parameter.data.normal_(0.0, scale, generator=generator)
        if "lm_head" in name:
            silent = torch.ones(len(parameter), dtype=torch.bool)
            silent[list(answer_tokens)] = False
            parameter.data[silent] = 0.0


def write_qwen2_5_vl(recipe: Qwen25VL, folder: Path) -> None:
    """Write configuration, bf16 weights, tokenizer and image processor of `recipe` into the existing `folder`."""
    import torch
    from transformers import GenerationConfig, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokens = tokenizer(recipe.vocabulary)
    ids: Callable[[str], Any] = tokens.convert_tokens_to_ids
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": recipe.vocabulary,
            "hidden_size": recipe.hidden,
            "intermediate_size": recipe.intermediate,
            "num_hidden_layers": recipe.layers,
            "num_attention_heads": recipe.heads,
            "num_key_value_heads": recipe.kv_heads,
            "head_dim": recipe.head_size,
            "max_position_embeddings": recipe.context,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": recipe.rope_theta,
                "mrope_section": list(recipe.mrope_section),
            },
            "eos_token_id": ids("<|im_end|>"),
            "bos_token_id": ids("<|endoftext|>"),
        },
        vision_config={
            "depth": recipe.vision_depth,
            "hidden_size": recipe.vision_hidden,
            "intermediate_size": 2 * recipe.vision_hidden,
            "num_heads": 4,
            "out_hidden_size": recipe.hidden,
            "fullatt_block_indexes": [recipe.vision_depth - 1],
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "window_size": 4 * PATCH * MERGE,
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=False,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    initialise(model, recipe.seed, printable_tokens(tokens))
    model.generation_config = GenerationConfig(
        eos_token_id=[ids("<|im_end|>"), ids("<|endoftext|>")],
        pad_token_id=ids("<|endoftext|>"),
        bos_token_id=ids("<|endoftext|>"),
        max_new_tokens=DEFAULT_ANSWER_TOKENS,
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    tokens.save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        min_pixels=MIN_IMAGE_TOKENS * PIXELS_PER_TOKEN,
        max_pixels=MAX_IMAGE_TOKENS * PIXELS_PER_TOKEN,
        patch_size=PATCH,
        merge_size=MERGE,
    ).save_pretrained(folder)


def main(arguments: Sequence[str]) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m infra.checkpoints", description="Write the reference models.")
    parser.add_argument("name", choices=[*RECIPES, "all"])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="default: %(default)s")
    options = parser.parse_args(arguments)
    for name in RECIPES if options.name == "all" else [options.name]:
        print(checkpoint_path(name, options.out))


if __name__ == "__main__":
    main(sys.argv[1:])
