"""Options of a request for its videos."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class VideoOptions(BaseModel):
    """Cuts of a request's videos into chunks."""

    model_config = ConfigDict(extra="forbid")

    segment_seconds: float | None = Field(
        None,
        ge=0.5,
        le=3600,
        description="Cut videos at multiples of so many seconds from their first frame; each segment is a chunk. "
        "null: a video is one chunk.",
    )
    start_seconds: float = Field(
        0.0, ge=0, description="Where a video begins; with segments, those that end by then are left out whole."
    )
    end_seconds: float | None = Field(
        None, gt=0, description="Where it ends; with segments, those that begin by then are left out whole."
    )
