"""Settings of documents: how files become pages, and the bounds on reading them."""

from __future__ import annotations

from pydantic import Field

from serving.settings import MIB, Settings


class DocumentSettings(Settings):
    """Pages of PDFs and office files."""

    dpi: int = Field(
        96,
        ge=36,
        le=300,
        description="Dots per inch at which pages are drawn. A page drawn otherwise is another chunk; the model's "
        "processor may make it smaller.",
    )
    max_pdf_bytes: int = Field(32 * MIB, ge=1, description="Largest PDF or office file, as sent or uploaded.")
    max_pdf_pages: int = Field(2000, ge=1, description="Most pages of a PDF.")
    pdf_timeout_s: float = Field(
        60.0, gt=0, description="Time in which a PDF, or those of its pages that a request names, must be read."
    )
    pdf_memory_bytes: int = Field(
        1024 * MIB, ge=128 * MIB, description="Address space of the process that reads one PDF."
    )
    office_timeout_s: float = Field(
        120.0, gt=0, description="Time in which LibreOffice must convert an office file (docx, pptx, odt, odp, html)."
    )
    office_memory_bytes: int = Field(
        4096 * MIB, ge=512 * MIB, description="Address space of each of LibreOffice's processes for one file."
    )
    readers: int = Field(2, ge=1, description="PDFs that one replica reads at once; further ones wait.")


class VideoSettings(Settings):
    """Videos of requests."""

    max_bytes: int = Field(64 * MIB, ge=1, description="Largest video, as sent, fetched or uploaded.")
    max_seconds: float = Field(600.0, gt=0, description="Longest video.")
    max_frames: int = Field(100_000, ge=1, description="Most frames of a video, whether they are sampled or not.")
    max_frame_pixels: int = Field(8_300_000, ge=1, description="Most pixels of one frame.")
    max_sampled_pixels: int = Field(
        400_000_000, ge=1, description="Most pixels of all frames that are sampled of a request's videos."
    )
    fps: float = Field(2.0, gt=0, le=30, description="Frames that are sampled a second, as vLLM samples for the model.")
    timeout_s: float = Field(60.0, gt=0, description="Time in which a video must be read.")
    memory_bytes: int = Field(
        1536 * MIB, ge=256 * MIB, description="Address space of the process that reads one video."
    )
    readers: int = Field(2, ge=1, description="Videos that one replica reads at once; further ones wait.")
