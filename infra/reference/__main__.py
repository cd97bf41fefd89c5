"""Command line: train reference models, refine and average them, evaluate them."""

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
    from infra.reference.making import average, evaluate, make, refine

    parser = argparse.ArgumentParser(prog="python -m infra.reference", description="Make the reference models.")
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {
        make: "train a family's model, write and evaluate it; goes on where it stopped",
        refine: "train one that was made on the splits that came later; goes on where it stopped",
        average: "give one the mean of the weights that rounds of refining ended with",
        evaluate: "evaluate one as it is and write the result into its card",
    }
    for command, text in helps.items():
        options = commands.add_parser(command.__name__, help=text)
        options.set_defaults(run=command)
        options.add_argument("family", choices=FAMILIES)
        options.add_argument("--work", type=Path, default=Path(".orbitserve/reference"), help="default: %(default)s")
        options.add_argument("--out", type=Path, default=WEIGHTS, help="default: beside this package")
        options.add_argument("--items", type=_positive, default=500, help="evaluated per split (default: %(default)s)")
        options.add_argument("--threads", type=_positive, default=2, help="of the processor (default: %(default)s)")
        options.add_argument("--device", default="cpu", help="or a GPU, such as cuda or cuda:1 (default: %(default)s)")
        if command is average:
            options.add_argument("--rounds", type=int, nargs="+", required=True, help="of refining, from 1 on")
        if command in (average, evaluate):
            continue
        options.add_argument("--compiled", action="store_true", help="compile the language model's layers for training")
        if command is refine:
            options.add_argument("--again", action="store_true", help="train further what was refined before")
            about = options.add_mutually_exclusive_group()
            counting, clips = "mostly on colours counted across pages", "mostly on pages that are seconds of clips"
            about.add_argument("--counting", dest="about", action="store_const", const="counting", help=counting)
            about.add_argument("--clips", dest="about", action="store_const", const="clips", help=clips)
            options.set_defaults(about="")
    chosen = parser.parse_args(arguments)

    import torch

    torch.set_num_threads(chosen.threads)
    own = {average: ("rounds",), make: ("compiled",), refine: ("compiled", "again", "about"), evaluate: ()}
    more = {name: getattr(chosen, name) for name in own[chosen.run]}
    more |= {"work": chosen.work, "out": chosen.out, "count": chosen.items, "device": torch.device(chosen.device)}
    try:
        for line in chosen.run(chosen.family, **more):
            print(json.dumps(line), flush=True)
    except ValueError as error:
        parser.exit(1, f"error: {error}\n")


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


if __name__ == "__main__":
    main(sys.argv[1:])
