"""Byte-level tokenizer of the reference models, with added tokens and Qwen2.5's chat format."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VISION, VIDEO = "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_start|><|video_pad|><|vision_end|>"

# The order of Qwen2.5-VL's own added tokens. The last two are ordinary text to the tokenizer's decoder: vLLM's hermes
# tool parser looks for them in the decoded answer.
SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
TOOL_TOKENS = ("<tool_call>", "</tool_call>")


def chat_template(image: str = VISION) -> str:
    """The chat format with a family's text for an image."""
    template = (Path(__file__).parent / "chat.jinja").read_text()
    return template.replace("IMAGE\n", f"{image}\n").replace("VIDEO\n", f"{VIDEO}\n")


def byte_vocabulary(size: int, words: Sequence[str] = ()) -> list[str]:
    """`size` token texts in the byte-level alphabet: bytes, `words`, then made-up syllables.

    Text is encoded word by word where a word is known, else byte by byte, since there are no merges; the syllables
    only make every id decode to text, and none is a word that anybody writes on its own.
    """
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    alphabet += [word.replace(" ", "Ġ") for word in words if word.replace(" ", "Ġ") not in alphabet]
    consonants, vowels, space = "bcdfghjklmnprstvwz", "aeiou", "Ġ"
    syllables = ("".join(parts) for parts in product(consonants, vowels, consonants, vowels))
    short = ("".join(parts) for parts in product((space, ""), consonants, vowels))
    for token in (*short, *syllables):
        if len(alphabet) == size:
            break
        if token not in alphabet:
            alphabet.append(token)
    if len(alphabet) != size:
        raise ValueError(f"no {size} tokens to make a vocabulary of")
    return alphabet


def tokenizer(
    vocabulary: int, added: Sequence[str] = (), image: str = VISION, words: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Byte-level tokenizer with Qwen2.5-VL's added tokens and `vocabulary` decodable ids.

    `added`: a family's further special tokens; `image`: what its chat template writes for an image; `words`: ASCII
    texts that are one token each where they stand as a word, with the space before them if they begin with one.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = [*SPECIAL_TOKENS, *added]
    plain = byte_vocabulary(vocabulary - len(special) - len(TOOL_TOKENS), words)
    vocab = {token: index for index, token in enumerate(plain)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=bool(words)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOOL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=special,
        model_max_length=32768,
    )
    fast.chat_template = chat_template(image)
    return fast


def printable_tokens(tokens: PreTrainedTokenizerFast) -> list[int]:
    """Ids whose text is printable ASCII, added tokens excluded."""
    added = set(tokens.get_added_vocab().values())
    return [
        index
        for index in range(len(tokens))
        if index not in added and (text := tokens.decode([index])).isascii() and text.isprintable()
    ]
