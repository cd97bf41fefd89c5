"""`python -m infra.reference`: train reference models, evaluate them, draw pages."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> None:
    """Command line; see `--help`."""
    from infra.reference.families import FAMILIES

    parser = argparse.ArgumentParser(prog="python -m infra.reference", description="Make the reference models.")
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train the language model of a family; goes on where it was stopped")
    training.add_argument("family", choices=FAMILIES)
    training.add_argument("--work", type=Path, default=Path(".orbitserve/reference"), help="default: %(default)s")
    training.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    options = parser.parse_args(arguments)

    import torch

    torch.set_num_threads(options.threads)
    if options.command == "train":
        from infra.reference.making import train_language

        for line in train_language(options.family, options.work):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
