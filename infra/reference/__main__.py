"""`python -m infra.reference`: train reference models, evaluate them, draw pages."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from infra.reference import WEIGHTS


def main(arguments: Sequence[str]) -> None:
    """Command line; see `--help`."""
    from infra.reference.families import FAMILIES
    from infra.reference.making import make

    parser = argparse.ArgumentParser(prog="python -m infra.reference", description="Make the reference models.")
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="train a family's model, write and evaluate it; goes on where it stopped")
    making.add_argument("family", choices=FAMILIES)
    making.add_argument("--work", type=Path, default=Path(".orbitserve/reference"), help="default: %(default)s")
    making.add_argument("--out", type=Path, default=WEIGHTS, help="default: beside this package")
    making.add_argument("--items", type=int, default=500, help="evaluated per split (default: %(default)s)")
    making.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    options = parser.parse_args(arguments)

    import torch

    torch.set_num_threads(options.threads)
    for line in make(options.family, options.work, options.out, options.items):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
