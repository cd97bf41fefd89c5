"""Settings of the library, of its patches and of the tenants' files.

Loaded once at the edge and passed in.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, SecretStr

GIB = 1 << 30
MIB = 1 << 20


class FactorType(StrEnum):
    """Number type of patch factors: int8 with one scale per direction, or the model's dtype."""

    int8 = "int8"
    model = "model"


class LibrarySettings(BaseModel):
    """Places of canonicals, patches and embeddings, and limits per tier."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    directory: Path | None = Field(
        default=Path(".orbitserve/library"),
        description="Local directory; processes of a node may share it. None: no disk.",
    )
    durable: bool = Field(
        default=False,
        description="Sync every record to the local disk before it counts as written. Off, a power cut may lose or "
        "damage what was written last; that is noticed and computed again. A process that is killed loses what it had "
        "not written yet either way.",
    )
    url: str | None = Field(
        default=None, description="fsspec URL behind the disk, such as s3://bucket/prefix. None: none."
    )
    storage_options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the URL's fsspec file system (endpoint, credentials, timeouts)."
    )
    memory_bytes: int = Field(default=2 * GIB, ge=0, description="Decoded records kept in this process's memory.")
    tenant_memory_bytes: int | None = Field(
        default=None, ge=0, description="The same for any one tenant. None: memory_bytes."
    )
    device_bytes: int = Field(
        default=1 * GIB,
        ge=0,
        description="GPU memory of a prefill worker of one rank, beside what gpu_memory_utilization gives vLLM, for "
        "copies of the records in its memory that are used most: these are linked without a copy from the host. Of "
        "several ranks none keeps any.",
    )
    object_store_bytes: int = Field(
        default=1 * GIB,
        ge=0,
        description="Bytes of records in the object stores of the Ray cluster, in all; 0, and outside a cluster: none.",
    )
    disk_bytes: int = Field(default=64 * GIB, ge=0, description="Bytes of records in the directory.")
    remote_bytes: int | None = Field(
        default=None, ge=0, description="Bytes of records behind the URL. None: unbounded."
    )
    tenant_bytes: int | None = Field(
        default=None, ge=0, description="The same per tier for any one tenant. None: the tier's."
    )
    writers: int = Field(
        default=4,
        ge=1,
        description="Processes that may write to the same tiers: prefill workers, patch compilers, caching jobs; a "
        "service takes at least as many as it may have. With more than one, a twentieth of every tier's bytes stays "
        "free for what the others wrote since one looked last.",
    )
    verify: bool = Field(default=True, description="Check every layer's checksum when a record is loaded from a tier.")
    load_timeout_s: float = Field(default=2.0, gt=0, description="A slower load is a miss; it still warms the memory.")
    load_threads: int = Field(default=16, ge=1, description="Loads in progress at once from one tier.")
    write_queue_items: int = Field(default=256, ge=1, description="Records waiting for a tier; more are dropped.")
    write_queue_bytes: int = Field(
        default=1 * GIB, ge=1, description="Bytes waiting for a tier; more are dropped, but for one record by itself."
    )
    tier_failures: int = Field(
        default=3, ge=1, description="Failures in a row after which a tier is suspended for a while."
    )
    tier_cooldown_s: float = Field(
        default=10.0,
        gt=0,
        description="Seconds that a failing tier is suspended. Then one failure is enough, until it succeeds.",
    )
    deletion_grace_s: float = Field(
        default=60.0,
        ge=0,
        description="For how long after a deletion nothing that derives from the content is kept: requests may still "
        "be at work on it.",
    )
    salt_secret: SecretStr = Field(
        default=SecretStr(""),
        description="Secret in every tenant's content-id salt; set it where tenants must not guess ids.",
    )


class FileSettings(BaseModel):
    """Limits of the static library: the files that tenants upload."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_file_bytes: int = Field(
        default=512 * MIB, ge=1, description="Largest upload; `http` bounds images and documents besides."
    )
    max_tenant_bytes: int = Field(default=16 * GIB, ge=1, description="All files of one tenant together.")
    named_tenant_bytes: dict[str, Annotated[int, Field(ge=1)]] = Field(
        default_factory=dict, description="The same of tenants by their names, instead of `max_tenant_bytes`."
    )
    max_tenant_files: int = Field(default=10_000, ge=1, description="Files of one tenant.")
    default_expiry_s: int | None = Field(
        default=None, ge=1, description="Lifetime of a file uploaded without expires_after."
    )
    max_expiry_s: int = Field(default=30 * 24 * 3600, ge=1, description="Longest expires_after, in seconds.")
    salt_secret: SecretStr = Field(
        default=SecretStr(""), description="The library's, which need not be said again: content ids must agree."
    )
    storage_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the fsspec file system; empty: the library's, where both have one protocol.",
    )
