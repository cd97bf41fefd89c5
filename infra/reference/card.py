"""The card beside a reference model's weights: what it is, how it was trained, what it answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TEMPLATE = Path(__file__).parent / "card.md"


def card(
    family: str,
    parameters: int,
    curve: list[dict[str, Any]],
    machine: Mapping[str, Any],
    scores: Mapping[str, float],
    items: int,
) -> str:
    """The card's text. `machine`: `cpu` and `threads`; `scores`: share of right answers by split."""
    tower = [line for line in curve if "tower" in line]
    language = [line for line in curve if "tower" not in line]
    return _TEMPLATE.read_text().format(
        family=family,
        parameters=parameters / 1e6,
        steps=language[-1]["step"],
        tower_steps=tower[-1]["step"],
        minutes=sum(part[-1]["seconds"] for part in (language, tower)) / 60,
        cpu=machine["cpu"],
        cores=f"{machine['threads']} core{'s' * (machine['threads'] > 1)}",
        items=items,
        rows="\n".join(f"| {split} | {share:.3f} |" for split, share in scores.items()),
    )


def curve_text(curve: list[dict[str, Any]]) -> str:
    """The curve as JSON, a line a measurement."""
    lines = ",\n".join(json.dumps(line) for line in curve)
    return f"[\n{lines}\n]\n"
