"""The card beside a reference model's weights: what it is, how it was trained, what it answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TEMPLATE = (Path(__file__).parent / "card.md").read_text()
_SCORES = "## Held-out questions"  # where the card's second part begins
_REFINED = """\
Then `python -m infra.reference refine {command} {options}` trained the language model for {steps} further steps,
{minutes:.0f} minutes by the clock on {machine}, at a learning rate of at most {rate:g}, over what the tower writes,
embeddings and tower as they were: with pages beside whose things stand tally marks (`tally`), and with more questions
about two things. Its lines in the curve say `refined`, and in which round.

"""
_AVERAGED = """\
Then `python -m infra.reference average {family} --rounds {rounds}` gave it the mean of the weights that these rounds of
refining ended with.

"""


@dataclass(frozen=True)
class Machine:
    """What a model was trained on, as a card says it, and the command's options that say so."""

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
    refined = _REFINED.format(
        command=command,
        steps=last["step"],
        minutes=last["seconds"] / 60,
        rate=rate,
        machine=machine.name,
        options=machine.options,
    )
    return _continued(before, refined, scores, items)


def average_card(before: str, family: str, rounds: Sequence[int], scores: Mapping[str, float], items: int) -> str:
    """The text of the card of a mean of `rounds`; else as `refined_card` has it."""
    averaged = _AVERAGED.format(family=family, rounds=" ".join(map(str, rounds)))
    return _continued(before, averaged, scores, items)


def evaluated_card(before: str, scores: Mapping[str, float], items: int) -> str:
    """The text of the card of a model that was evaluated again; else as `refined_card` has it."""
    return _continued(before, "", scores, items)


def _continued(before: str, more: str, scores: Mapping[str, float], items: int) -> str:
    template = _SCORES + _TEMPLATE.partition(_SCORES)[2]
    return before.partition(_SCORES)[0] + more + template.format(**_scored(scores, items))


def _scored(scores: Mapping[str, float], items: int) -> dict[str, Any]:
    return {"items": items, "rows": "\n".join(f"| {split} | {share:.3f} |" for split, share in scores.items())}


def curve_text(curve: list[dict[str, Any]]) -> str:
    """The curve as JSON, a line a measurement."""
    lines = ",\n".join(json.dumps(line) for line in curve)
    return f"[\n{lines}\n]\n"
