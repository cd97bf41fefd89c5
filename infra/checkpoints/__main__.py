"""`python -m infra.checkpoints NAME|all [--out DIR]`: write random checkpoints."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from infra.checkpoints import DEFAULT_OUT, RECIPES, checkpoint_path


def main(arguments: Sequence[str]) -> None:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m infra.checkpoints", description="Write random checkpoints in the shape of real families."
    )
    parser.add_argument("name", choices=[*RECIPES, "all"])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="default: %(default)s")
    options = parser.parse_args(arguments)
    for name in RECIPES if options.name == "all" else [options.name]:
        print(checkpoint_path(name, options.out))


if __name__ == "__main__":
    main(sys.argv[1:])
