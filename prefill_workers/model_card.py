"""Model card: facts measured of a model, kept beside its weights (`orbitserve.json`).

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


class BadModelCard(ValueError):
    """A model's `orbitserve.json` that cannot be used; the message names file and key."""


class ModelCard(BaseModel):
    """The file's content."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    compose_up_to: int = Field(ge=0)
    weigh_by: Weighing = Weighing.KV


def measured(model: Path) -> ModelCard | None:
    """The card beside a checkpoint's weights; None if there is none.

    Raises:
        BadModelCard: it cannot be read, is no such JSON, or a key is unknown, missing or wrong.
    """
    file = model / FILE
    try:
        return ModelCard.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadModelCard(f"cannot read {file}: {error.strerror}") from error
    except ValidationError as error:
        problems = ("".join(f"{key}: " for key in each["loc"]) + each["msg"] for each in error.errors())
        raise BadModelCard(f"{file}: " + "; ".join(problems)) from error


def composition_for(model: Path, compose_up_to: int | None, weigh_by: Weighing | None) -> ModelCard:
    """Settings of sums of pair patches: as wanted, else as measured of the model, else defaults.

    Raises:
        BadModelCard: see `measured`; only where something is None.
    """
    if compose_up_to is not None and weigh_by is not None:
        return ModelCard(compose_up_to=compose_up_to, weigh_by=weigh_by)
    found = measured(model) or ModelCard(compose_up_to=COMPOSE_UP_TO)
    wanted = {"compose_up_to": compose_up_to, "weigh_by": weigh_by}
    return found.model_copy(update={key: value for key, value in wanted.items() if value is not None})
