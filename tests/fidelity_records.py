"""What was recorded of a reference model's fidelity, in one run or section by section."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "benchmarks/results"


@cache
def recorded(kind: str) -> dict[str, Any] | None:
    """A family's records as one: every table and figure as it was measured last; None: there is none."""
    documents = [json.loads(path.read_text()) for path in RESULTS.glob(f"fidelity-{kind}*-cpu2.json")]
    if not documents:
        return None
    documents.sort(key=lambda document: document["date"])
    return {
        "tables": {name: table for document in documents for name, table in document["tables"].items()},
        "figures": {name: figure for document in documents for name, figure in document["figures"].items()},
        "weights": [document["workload"]["weights"] for document in documents],
    }
