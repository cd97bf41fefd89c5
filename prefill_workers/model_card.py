"""Model card: facts measured of a model, kept beside its weights (`orbitserve.json`).

    {"compose_up_to": 3, "weigh_by": "attention"}

| key             | what                                                                 | measured by                 |
|-----------------|----------------------------------------------------------------------|-----------------------------|
| `compose_up_to` | antecedents whose pair patches may be summed; 0: sums lose answers   | `orbitserve bench fidelity` |
| `weigh_by`      | what weighs them: `attention` if that holds as far as `kv` (default) | the same                    |
| `lazy_blocks`   | layers that share visual queries and keys, the first of each leads   | `orbitserve lazy`           |
| `aligned_words` | true if what the vision tower writes resembles the words for it      | benchmark `mrag`            |

Lazy blocks are part of the model's fingerprint, the others are not: what the library holds stays as it is, whatever may
be summed of it.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from prefill_workers.settings import COMPOSE_UP_TO, Weighing

FILE = "orbitserve.json"


class BadModelCard(ValueError):
    """A model's `orbitserve.json` that cannot be used; the message names file and key."""


class ModelCard(BaseModel):
    """The file's content."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    compose_up_to: int = Field(COMPOSE_UP_TO, ge=0)
    weigh_by: Weighing = Weighing.KV
    lazy_blocks: tuple[tuple[int, ...], ...] = ()
    aligned_words: bool = False

    @field_validator("lazy_blocks")
    @classmethod
    def _neighbours(cls, blocks: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        layers = [layer for block in blocks for layer in block]
        whole = all(len(block) > 1 and block == tuple(range(block[0], block[0] + len(block))) for block in blocks)
        if not whole or layers != sorted({*layers}) or min(layers, default=0) < 0:
            raise ValueError("blocks are neighbouring layers in order, two of them at least: [[2, 3], [5, 6, 7]]")
        return blocks


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


def write_lazy_blocks(model: Path, blocks: tuple[tuple[int, ...], ...]) -> Path:
    """Write a model's lazy blocks into its card, whose other facts stay; returns the file.

    Raises:
        BadModelCard: see `measured`.
    """
    card = ModelCard.model_validate(
        {**(measured(model) or ModelCard()).model_dump(exclude_unset=True), "lazy_blocks": blocks}
    )
    (model / FILE).write_text(card.model_dump_json(exclude_unset=True) + "\n")
    return model / FILE


def composition_for(model: Path, compose_up_to: int | None, weigh_by: Weighing | None) -> ModelCard:
    """Settings of sums of pair patches: as wanted, else as measured of the model, else defaults.

    Raises:
        BadModelCard: see `measured`; only where something is None.
    """
    if compose_up_to is not None and weigh_by is not None:
        return ModelCard(compose_up_to=compose_up_to, weigh_by=weigh_by)
    found = measured(model) or ModelCard()
    wanted = {"compose_up_to": compose_up_to, "weigh_by": weigh_by}
    return found.model_copy(update={key: value for key, value in wanted.items() if value is not None})
