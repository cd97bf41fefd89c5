"""Model card of a reference model: what it is, how it was trained, what it answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TEMPLATE = (Path(__file__).parent / "card.md").read_text()
_SCORES = "## Held-out questions"  # where the card's second part begins
_ROUNDS = """\
Rounds of `refine` then trained the language model further over what the tower writes, embeddings and tower as before:
with pages beside whose things stand tally marks (`tally`), and with more questions about two things; `--counting` means
mostly on colours counted across pages, `--clips` mostly on pages that are seconds of clips. Each round draws pages of
its own; its lines in the curve say `refined`, and in which round. `average` gives it the mean of the weights that
rounds ended with, and the next round goes on from there.

| round | `python -m infra.reference` | steps | rate, at most | minutes by the clock |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Machine:
    """Training machine of a model card, and the command's options that name it."""

    name: str
    options: str


def card(
    family: str,
    parameters: int,
    curve: list[dict[str, Any]],
    machine: Machine,
    scores: Mapping[str, float],
    items: int,
) -> str:
    """The card's text. `scores`: share of right answers by split."""
    tower = [line for line in curve if "tower" in line]
    language = [line for line in curve if "tower" not in line]
    return _TEMPLATE.format(
        family=family,
        parameters=parameters / 1e6,
        steps=language[-1]["step"],
        tower_steps=tower[-1]["step"],
        minutes=sum(part[-1]["seconds"] for part in (language, tower)) / 60,
        machine=machine.name,
        options=machine.options,
        **_scored(scores, items),
    )


def refined_card(
    before: str,
    command: str,
    curve: list[dict[str, Any]],
    machine: Machine,
    scores: Mapping[str, float],
    items: int,
    rate: float,
) -> str:
    """The text of a refined model's card.

    `before`: its card before that. `command`: the family and what else refining was told. `rate`: the highest learning
    rate of its refining. Else as `card` has it.
    """
    last = [line for line in curve if "refined" in line][-1]
    cells = (
        last["refined"],
        f"`refine {command} {machine.options}`",
        last["step"],
        f"{rate:g}",
        f"{last['seconds'] / 60:.0f} on {machine.name}",
    )
    return _continued(before, scores, items, cells)


def average_card(before: str, family: str, rounds: Sequence[int], scores: Mapping[str, float], items: int) -> str:
    """The text of the card of a mean of `rounds`; else as `refined_card` has it."""
    command = f"`average {family} --rounds {' '.join(map(str, rounds))}`"
    return _continued(before, scores, items, ("", command, *[""] * 3))


def evaluated_card(before: str, scores: Mapping[str, float], items: int) -> str:
    """The text of the card of a model that was evaluated again; else as `refined_card` has it."""
    return _continued(before, scores, items)


def _continued(before: str, scores: Mapping[str, float], items: int, cells: Sequence[object] = ()) -> str:
    """A card with other scores, and with `cells` as one more line of its table of rounds."""
    training = before.partition(_SCORES)[0].rstrip("\n")
    if cells:
        if "| round |" not in training:
            training += "\n\n" + _ROUNDS.rstrip("\n")
        training += "\n| " + " | ".join(map(str, cells)) + " |"
    template = _SCORES + _TEMPLATE.partition(_SCORES)[2]
    return training + "\n\n" + template.format(**_scored(scores, items))


def _scored(scores: Mapping[str, float], items: int) -> dict[str, Any]:
    return {"items": items, "rows": "\n".join(f"| {split} | {share:.3f} |" for split, share in scores.items())}


def curve_text(curve: list[dict[str, Any]]) -> str:
    """The curve as JSON, a line a measurement."""
    lines = ",\n".join(json.dumps(line, allow_nan=False) for line in curve)
    return f"[\n{lines}\n]\n"
