"""Settings of autoscaling."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class Mode(StrEnum):
    """Effect of plans."""

    OFF = "off"
    ADVISE = "advise"
    ACT = "act"


class AutoscaleSettings(BaseModel):
    """Replicas by load: promises to clients, and how the planner goes about them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Mode = Field(
        Mode.ADVISE,
        description="off: no plans; advise: plans are made, logged and shown by metrics, replicas stay; act: roles "
        "whose `replicas` is {min, max} follow their plan.",
    )
    ttft_s: float | None = Field(
        None, gt=0, description="Time to the first token that is promised. None: roles are sized by `headroom`."
    )
    itl_s: float | None = Field(None, gt=0, description="Time between two tokens that is promised. None: not minded.")
    attainment: float = Field(0.99, gt=0, lt=1, description="Share of the requests that are to be within the limits.")
    headroom: float = Field(
        1.0,
        ge=0,
        description="Replicas besides those that a load keeps busy, times its square root; where ttft_s is None.",
    )
    settle_s: float = Field(
        300.0,
        ge=0,
        description="Time between two changes of a role in opposite directions; more are needed to grow "
        "again soon after each shrink.",
    )
    gpus: float | None = Field(
        None,
        gt=0,
        description="GPUs of all roles together; plans beyond are cut. None: as many as roles may take.",
    )
    nodes: bool = Field(
        False,
        description="Ask Ray's autoscaler for nodes as soon as replicas are planned, in `act`. A cluster has one such "
        "request (ray.autoscaler.sdk.request_resources): leave it off where something else makes it.",
    )
    period_s: float = Field(2.0, gt=0, description="Seconds between two plans.")
    log: Path | None = Field(
        None, description="JSONL file of all decisions with what they follow from, on the keeper's node. None: no file."
    )
