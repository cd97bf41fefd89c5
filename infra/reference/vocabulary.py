"""Vocabulary of the reference models: things, their colours, and the questions' words.

A thing and a colour is one token each, so that a question names a thing with one token and an answer is one token.
Everything else that somebody may write is encoded byte by byte, as with the other reference models.
"""

from __future__ import annotations

from collections.abc import Sequence

LETTERS = tuple("ABCDEFGHJKLMNPQRSTUVWXYZ")  # without I and O: too like other signs at this size
SHAPES = (
    "circle", "square", "triangle", "diamond", "star", "cross", "ring", "heart", "moon", "arrow", "house", "cup",
    "fish", "tree", "key", "bell",
)  # fmt: skip
PATTERNS = ("stripes", "dots", "checks", "waves", "bars", "bricks", "rays", "grid")
THINGS = (*LETTERS, *SHAPES, *PATTERNS)
COLOURS = {
    "red": (214, 39, 40), "green": (44, 140, 44), "blue": (40, 80, 220), "yellow": (240, 205, 20),
    "orange": (255, 127, 14), "purple": (130, 60, 170), "cyan": (30, 190, 207), "brown": (120, 72, 40),
}  # fmt: skip
_WORDS = ("system", "user", "assistant", "What", " colour", " colours", " is", " are", " the", " and", " page", "Page")


def words() -> list[str]:
    """Texts that are one token each, in fixed order: names after a space, first colours without."""
    return [*_WORDS, *(f" {thing}" for thing in THINGS), *COLOURS, *(f" {colour}" for colour in COLOURS)]


def question(things: Sequence[str]) -> str:
    """The question for the colours of one or two things."""
    if len(things) == 1:
        return f"What colour is the {things[0]}?"
    return f"What colours are the {things[0]} and the {things[1]}?"


def answer(colours: Sequence[str]) -> str:
    """The answer to `question`."""
    return " ".join(colours)
