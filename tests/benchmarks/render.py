"""`python -m tests.benchmarks.render`: write the blocks of all Markdown documents anew.

A block stands between two comments, of which the first names its function in `tests.benchmarks.documents`:

    <!-- figures: ttft -->
    ...
    <!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.benchmarks.documents import code, fidelity, speed

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/**/README.md")])
BLOCKS: dict[str, Callable[[], str]] = speed.BLOCKS | fidelity.BLOCKS | code.BLOCKS
BLOCK = re.compile(r"(<!-- figures: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(text: str) -> str:
    """A document's text with all of its blocks made anew.

    Raises KeyError for a block that nothing makes.
    """
    return BLOCK.sub(lambda block: f"{block[1]}{BLOCKS[block[2]]()}\n{block[3]}", text)


def main() -> None:
    """Rewrite what changed, and name it."""
    for path in DOCUMENTS:
        text = path.read_text()
        if (new := rendered(text)) != text:
            path.write_text(new)
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
