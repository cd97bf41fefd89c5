"""What was measured of a model, kept beside its weights: `orbitserve.json`.

    {"compose_up_to": 3, "weigh_by": "attention"}

| key             | what                                                                 | measured by                 |
|-----------------|----------------------------------------------------------------------|-----------------------------|
| `compose_up_to` | antecedents whose pair patches may be summed; 0: sums lose answers   | `orbitserve bench fidelity` |
| `weigh_by`      | what weighs them: `attention` if that holds as far as `kv` (default) | the same                    |

It is no part of the model's fingerprint: what the library holds stays as it is, whatever may be summed of it.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prefill_workers.settings import COMPOSE_UP_TO, Weighing

FILE = "orbitserve.json"


class BadMeasurements(ValueError):
    """A model's `orbitserve.json` that cannot be used; the message names file and key."""


class Measured(BaseModel):
    """The file's content."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    compose_up_to: int = Field(ge=0)
    weigh_by: Weighing = Weighing.KV


def measured(model: Path) -> Measured | None:
    """What lies beside a checkpoint's weights; None: nothing does.

    Raises:
        BadMeasurements: it cannot be read, is no such JSON, or a key is unknown, missing or wrong.
    """
    file = model / FILE
    try:
        return Measured.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadMeasurements(f"cannot read {file}: {error.strerror}") from error
    except ValidationError as error:
        problems = ("".join(f"{key}: " for key in each["loc"]) + each["msg"] for each in error.errors())
        raise BadMeasurements(f"{file}: " + "; ".join(problems)) from error


def compose_up_to(model: Path, wanted: int | None) -> int:
    """Antecedents whose pair patches are summed: what is `wanted`, else what was measured, else the general default.

    Raises:
        BadMeasurements: see `measured`; only where nothing is wanted.
    """
    if wanted is not None:
        return wanted
    found = measured(model)
    return COMPOSE_UP_TO if found is None else found.compose_up_to


def weigh_by(model: Path, wanted: Weighing | None) -> Weighing:
    """What weighs the pair patches of a sum: what is `wanted`, else what was measured, else the second layer's KV.

    Raises:
        BadMeasurements: see `measured`; only where nothing is wanted.
    """
    if wanted is not None:
        return wanted
    found = measured(model)
    return Weighing.KV if found is None else found.weigh_by
