"""Text as passages: overlapping windows of tokens, as OpenAI's static chunking cuts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

MAX_TOKENS, OVERLAP_TOKENS = 800, 400  # OpenAI's defaults
_SNAP = 8  # tokens that a window may end earlier, for a word's or line's end

Offsets = Callable[[str], Sequence[tuple[int, int]]]  # of a text's tokens: first character, and the one behind it


def form_of(max_tokens: int, overlap_tokens: int) -> str:
    """The way texts are cut: passages cut otherwise are other chunks."""
    return f"text-{max_tokens}-{overlap_tokens}-1"


def tokens_of(model: Path) -> Offsets:
    """Tokens of texts by a model's tokenizer; without `tokenizer.json` four characters each."""
    file = model / "tokenizer.json"
    if not file.exists():
        return lambda text: [(at, min(at + 4, len(text))) for at in range(0, len(text), 4)]
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def offsets(text: str) -> Sequence[tuple[int, int]]:
        found: Sequence[tuple[int, int]] = tokenizer.encode(text, add_special_tokens=False).offsets
        return found

    return offsets


def cut(text: str, offsets: Offsets, max_tokens: int = MAX_TOKENS, overlap_tokens: int = OVERLAP_TOKENS) -> list[str]:
    """Windows of a text that cover it; a text of `max_tokens` or fewer is one whole.

    A window ends between words where a few tokens allow it; the next one begins `overlap_tokens` before that.
    """
    places = offsets(text)
    if len(places) <= max_tokens:
        return [text]
    found, first = [], 0
    while True:
        end = min(first + max_tokens, len(places))
        if end < len(places):
            end = _between_words(text, places, first, end)
        start = places[first][0] if first else 0
        stop = places[end][0] if end < len(places) else len(text)
        found.append(text[start:stop])
        if end == len(places):
            return found
        first = max(first + 1, end - overlap_tokens)


def _between_words(text: str, places: Sequence[tuple[int, int]], first: int, end: int) -> int:
    """Token before which a window ends: behind a line, else a word, else where it must."""
    least = max(first + 1, end - _SNAP)
    for is_gap in (lambda gap: "\n" in gap, lambda gap: gap[:1].isspace() or gap[-1:].isspace()):
        for at in range(end, least - 1, -1):
            before, behind = places[at - 1], places[at]
            if is_gap(text[before[1] : behind[0]] or text[behind[0] : behind[0] + 1]):
                return at
    return end


def as_text(data: bytes) -> str | None:
    """The text of a UTF-8 file; None of anything else, and of a file without words."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text or not text.strip() else text
