"""Settings of a deployment, section by section; `serving.config` puts them together."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from decode_workers.settings import DecodeSettings
from infra.kv_window import refusal
from infra.vllm_env import is_cpu_build
from kvstore.records.keys import DYNAMIC_TENANT
from prefill_workers.protocol import Compaction, CompactionPolicy
from prefill_workers.settings import PatchFormSettings, PrefillSettings

MIB = 1 << 20


class Settings(BaseModel):
    """Of a section: unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSettings(Settings):
    """The model that is served."""

    path: Path = Field(
        description="Directory of a Hugging Face checkpoint that vLLM can load; or a name that `orbitserve fetch` "
        "knows, or a hub's ORGANISATION/NAME, which are downloaded where the configuration is read.",
    )
    served_name: str = Field("", description="Name in the API; empty: the model's, of a directory its own name.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Weights and KV; auto: as stored."
    )
    load_format: Literal["auto", "safetensors", "dummy"] = Field(
        "auto", description="How vLLM loads the weights; dummy: random ones, to size a deployment without any."
    )
    max_model_len: int | None = Field(
        None,
        ge=16,
        description="Longest prompt plus answer in tokens; None: the model's, or what the KV pools hold if less.",
    )
    default_max_tokens: int | None = Field(
        4096,
        ge=1,
        description="Longest answer of a chat where neither the request nor generation_config.json says one; None: "
        "what the prompt leaves. The decode worker keeps room for all of it from the start.",
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = Field(
        "auto", description="What engines keep KV as; auto: the model's dtype. Refused at start where vLLM cannot."
    )
    seed: int = Field(0, description="vLLM's seed for requests without one.")
    trust_remote_code: bool = Field(False, description="Run code that comes with the checkpoint.")
    chat_template: str | None = Field(None, description="Path or text of a chat template; None: the tokenizer's.")
    enable_auto_tool_choice: bool = Field(True, description="Let the model call tools on its own.")
    tool_call_parser: str | None = Field(
        "hermes", description="vLLM's parser for the model's tool calls; None: no tools."
    )
    reasoning_parser: str | None = Field(None, description="vLLM's parser for the model's reasoning; None: none.")

    @model_validator(mode="before")
    @classmethod
    def _name_after_directory(cls, values: object) -> object:
        if not isinstance(values, dict) or values.get("served_name"):
            return values
        path = values.get("path")
        if not isinstance(path, str | os.PathLike):
            return values  # to be refused by name
        return {**values, "served_name": Path(os.path.abspath(path)).name}

    @property
    def is_text_only(self) -> bool:
        """True for a plain language model; a checkpoint that cannot be read may have a vision tower."""
        try:
            config = json.loads((self.path / "config.json").read_bytes())
        except (OSError, ValueError):
            return False
        architectures = config.get("architectures") or [""]
        return "vision_config" not in config and all(name.endswith("ForCausalLM") for name in architectures)


class ApiKey(Settings):
    """Tenant of a bearer key; a tenant's name alone means an ordinary key of that tenant."""

    tenant: str = Field(min_length=1, description="Whose files and content the key reaches.")
    admin: bool = Field(False, description="May also maintain the dynamic library (/v1/vector_stores).")

    @model_validator(mode="before")
    @classmethod
    def _ordinary(cls, value: object) -> object:
        return {"tenant": value} if isinstance(value, str) else value

    @field_validator("tenant")
    @classmethod
    def _not_reserved(cls, tenant: str) -> str:
        if tenant == DYNAMIC_TENANT:
            raise ValueError(f"{DYNAMIC_TENANT!r} names the dynamic library; choose another name")
        return tenant


class TenantLimits(Settings):
    """Limits of one tenant; bytes of files are bounded in the section `files`."""

    weight: float = Field(1.0, gt=0, description="Share of the places for answers, relative to other tenants'.")
    requests_per_minute: int | None = Field(
        None, ge=1, description="Chats, completions and responses; further ones are answered 429. None: no limit."
    )
    tokens_per_minute: int | None = Field(
        None,
        ge=1,
        description="Tokens of prompts and answers; a request takes its longest answer until it has ended. None: no "
        "limit.",
    )


class TenantsSettings(Settings):
    """Shares of tenants, where there is more than one."""

    running: int | None = Field(
        None,
        ge=1,
        description="Answers in progress at once; further ones wait, and places go to the tenants that hold the "
        "fewest. None: as many as the decode workers take at once.",
    )
    reserve: float = Field(
        0.125,
        ge=0,
        lt=1,
        description="Share of the places, and of the requests in progress, that no tenant takes alone: others' begin "
        "at once.",
    )
    max_waiting: int = Field(
        256,
        ge=1,
        description="Answers of a tenant that may wait on an ingress replica; further ones are answered 429.",
    )
    default: TenantLimits = Field(TenantLimits(), description="Limits of tenants that are not named below.")
    named: dict[str, TenantLimits] = Field(default_factory=dict, description="Limits of tenants by their names.")

    def most_of_one(self, count: int) -> int:
        """Part of `count` that one tenant may take by itself."""
        return max(1, int(count * (1 - self.reserve)))

    def of(self, tenant: str) -> TenantLimits:
        """Limits of one tenant."""
        return self.named.get(tenant, self.default)


HASHED = "sha256:"  # of an entry that is the digest of a key
_HASHED_KEY = re.compile(rf"{HASHED}[0-9a-fA-F]{{64}}")


def _can_be_sent(keys: dict[str, ApiKey]) -> dict[str, ApiKey]:
    if not all(key and key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ValueError("a key is empty, or has other characters than printable ASCII without spaces")
    if not all(_HASHED_KEY.fullmatch(key) for key in keys if key.startswith(HASHED)):
        raise ValueError(f"an entry that begins with {HASHED} goes on with the 64 hexadecimal digits of a key's digest")
    return keys


ApiKeys = Annotated[dict[str, ApiKey], AfterValidator(_can_be_sent)]  # by key, or by `sha256:` and its digest


class HttpSettings(Settings):
    """The HTTP surface and its limits."""

    host: str = Field("127.0.0.1", description="Address of Ray Serve's proxy.")
    port: int = Field(8000, ge=1, le=65535, description="Port of Ray Serve's proxy.")
    max_body_bytes: int = Field(128 * MIB, ge=1, description="Largest request body; larger ones are answered 413.")
    max_bodies_bytes: int = Field(
        2048 * MIB,
        ge=1,
        description="Most bytes of the bodies of all requests in progress on one ingress replica; a further one is "
        "answered 429, unless it is alone.",
    )
    max_image_bytes: int = Field(20 * MIB, ge=1, description="Largest single image, as sent or uploaded.")
    max_document_bytes: int = Field(1 * MIB, ge=1, description="Largest single text document, as sent or uploaded.")
    max_image_pixels: int = Field(
        33_000_000,
        ge=1,
        le=178_956_970,  # Pillow opens none with more
        description="Most pixels of an image, read from its header.",
    )
    max_resized_pixels: int = Field(
        33_000_000,
        ge=1,
        description="Most pixels of an image as the model's processor resizes it: a thin one may become large there.",
    )
    max_request_pixels: int = Field(
        256_000_000, ge=1, description="Most pixels of all images of one request: decoded they take 4 bytes each."
    )
    max_decoded_pixels: int = Field(
        512_000_000,
        ge=1,
        description="Most pixels that chats and tokenisations on one ingress replica have decoded at once; the next "
        "request waits, but for one that has more by itself.",
    )
    max_images_per_request: int = Field(64, ge=1, description="Most images and documents in one request.")
    max_concurrent_requests: int = Field(
        256,
        ge=1,
        description="Requests in progress on one ingress replica: generations, tokenisations, uploads, downloads of "
        "files and pages; further ones are answered 429.",
    )
    body_timeout_s: float = Field(
        120.0, gt=0, description="Time allowed for a request's body to come; what takes longer is answered 408."
    )
    request_timeout_s: float | None = Field(
        600.0,
        gt=0,
        description="Time from a generation's arrival to its last token; an answer that takes longer ends with 504, a "
        "stream with an error event. None: no deadline.",
    )
    allow_http_images: bool = Field(
        False, description="Fetch http(s) image URLs. Private addresses are always refused."
    )
    allowed_media_domains: list[str] = Field(
        default_factory=list,
        description="Hosts that image URLs may name, exactly, also where one is redirected to; empty: all. They are "
        "fetched with `allow_http_images` alone.",
    )
    http_image_timeout_s: float = Field(10.0, gt=0, description="Time allowed to fetch one image.")
    cors_origins: list[str] = Field(
        default_factory=list, description="Origins whose pages may call this from a browser; ['*']: all."
    )
    api_keys: ApiKeys = Field(
        default_factory=dict,
        description="Bearer key, or its hash (`orbitserve hash-key`), to its tenant, or to {tenant: NAME, admin: true} "
        "for an administrator's. Empty, and without api_keys_file: no key needed, one tenant named `local` who is the "
        "administrator: everybody who reaches the port.",
    )
    api_keys_file: Path | None = Field(
        None,
        description="YAML or JSON file of further keys, as in api_keys; read again within a second of a change. Where "
        "replicas are on several nodes, on each of them.",
    )
    admin_paths: list[Literal["/metrics", "/docs", "/redoc", "/openapi.json"]] = Field(
        default_factory=list, description="Paths that take an administrator's key; without, they need none."
    )
    tls_certificate: Path | None = Field(
        None, description="PEM file of the certificate chain that Ray Serve's proxy shows; None: plain HTTP."
    )
    tls_key: Path | None = Field(None, description="PEM file of the certificate's private key, without a passphrase.")

    @field_validator("allowed_media_domains")
    @classmethod
    def _hosts(cls, domains: list[str]) -> list[str]:
        for domain in domains:
            if not re.fullmatch(r"[\w.-]+|[0-9a-fA-F:.]+", domain):
                raise ValueError(f"{domain!r} is not a host's name, such as pictures.example: no scheme, port or path")
        return [domain.lower().rstrip(".") for domain in domains]

    @model_validator(mode="after")
    def _complete(self) -> HttpSettings:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key need one another")
        if self.admin_paths and not self.api_keys and self.api_keys_file is None:
            raise ValueError("admin_paths need api_keys or api_keys_file: without keys everybody is the administrator")
        return self

    @property
    def has_tenants(self) -> bool:
        """True if keys of more than one tenant may come."""
        return self.api_keys_file is not None or len({owner.tenant for owner in self.api_keys.values()}) > 1

    @property
    def max_file_bytes(self) -> int:
        """Most bytes of an uploaded file."""
        return max(self.max_image_bytes, self.max_document_bytes)


class ReplicaRange(Settings):
    """Bounds between which the planner scales a role."""

    min: int = Field(1, ge=1, description="Fewest replicas; there are so many at first.")
    max: int = Field(ge=1, description="Most replicas.")

    @model_validator(mode="after")
    def _holds_a_number(self) -> ReplicaRange:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is more than max ({self.max})")
        return self


Replicas = Annotated[int, Field(ge=1)] | ReplicaRange


class RoleSettings(Settings):
    """Settings of every deployment: the number of replicas, and the resources of each."""

    replicas: Replicas = Field(
        1,
        description="Replicas of the role: a number, or {min, max} where they follow the load (see `autoscale.mode`; "
        "there are `min` where that is not `act`).",
    )
    num_cpus: float = Field(0.1, ge=0, description="CPUs that Ray reserves for a replica.")
    reserved_memory_bytes: int | None = Field(
        None,
        ge=1,
        description="Memory that Ray reserves for a replica, so that no node gets more of them than it has memory for. "
        "None: none.",
    )
    num_gpus: float | None = Field(
        None,
        ge=0,
        description="GPUs that Ray reserves for a replica. None: one for each rank of its engine where vLLM is a CUDA "
        "build (roles without an engine: none), else 0.",
    )
    resources: dict[str, float] = Field(
        default_factory=dict,
        description="Custom Ray resources that a replica reserves, as `ray start --resources` gives them to nodes: "
        "{prefill: 1} pins the role to nodes that have any.",
    )
    label_selector: dict[str, str] = Field(
        default_factory=dict,
        description="Labels that a replica's node must have, as `ray start --labels` gives them: {role: decode}; "
        "values may be `in(a,b)`, `!a` or `!in(a,b)`.",
    )
    max_replicas_per_node: int | None = Field(
        None, ge=1, le=100, description="Replicas of the role on one node at most; 1 spreads them. None: any number."
    )
    threads: int | None = Field(
        None, ge=1, description="OpenMP threads. None: the CPUs reserved, or all of the node's if less than one is."
    )
    niceness: int = Field(
        0,
        ge=0,
        le=19,
        description="How far a replica without a GPU gives way to others where they share processors, as with "
        "`nice`; at least as far as Ray's workers do (RAY_worker_niceness).",
    )
    max_ongoing_requests: int = Field(256, ge=1, description="Calls in progress on a replica before Serve queues.")
    health_check_period_s: float = Field(10.0, gt=0, description="Seconds between health checks.")
    graceful_shutdown_timeout_s: float = Field(20.0, ge=0, description="Time to finish running calls on shutdown.")

    @field_validator("resources")
    @classmethod
    def _custom(cls, resources: dict[str, float]) -> dict[str, float]:
        for name, amount in resources.items():
            if name in ("CPU", "GPU", "memory", "object_store_memory"):
                raise ValueError(f"{name!r} is Ray's own; num_cpus and num_gpus reserve processors")
            if not amount > 0 or (amount > 1 and amount != int(amount)):
                raise ValueError(f"{name}: {amount:g} is no part of one and no whole number, which Ray wants")
        return resources

    @property
    def least_replicas(self) -> int:
        """Replicas that there are at first, and at least."""
        return self.replicas.min if isinstance(self.replicas, ReplicaRange) else self.replicas

    @property
    def most_replicas(self) -> int:
        """Replicas that there may be."""
        return self.replicas.max if isinstance(self.replicas, ReplicaRange) else self.replicas

    @property
    def ranks(self) -> int:
        """Ranks of the role's engine; 0: it has none."""
        return 0

    @property
    def gpus(self) -> float:
        """GPUs that Ray reserves for a replica; see `reserved_gpus`."""
        return reserved_gpus(self.num_gpus, self.ranks)


def reserved_gpus(asked: float | None, ranks: int) -> float:
    """GPUs of an engine's process: as asked for, else one a rank where vLLM is a CUDA build."""
    if asked is not None:
        return asked
    return 0 if is_cpu_build() else ranks


class IngressSettings(RoleSettings):
    """The HTTP front end."""

    max_ongoing_requests: int = Field(1024, ge=1, description="Calls in progress on a replica before Serve queues.")
    processor_cache_gib: float = Field(1.0, ge=0, description="Processed images kept, so that repeats are not decoded.")
    index_period_s: float = Field(
        1.0, gt=0, description="Seconds between looks for newly formed patches, by which free chunks are ordered."
    )


class VisionSettings(RoleSettings):
    """The vision encoder. It gives way to the prefill of requests that came before."""

    max_ongoing_requests: int = Field(1024, ge=1, description="Calls in progress on a replica before Serve queues.")
    replicas: Annotated[int, Field(ge=0)] | ReplicaRange = Field(
        default_factory=lambda: 0 if is_cpu_build() else 1,  # on a CPU it would take its cores from the other roles
        description="As for all roles. 0: prefill workers encode the images that they link themselves, the default "
        "where vLLM is a CPU build; else it is 1. A text-only model has none.",
    )
    niceness: int = Field(5, ge=0, le=19, description="As for all roles: requests that came before are computed first.")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Share of GPU memory that vLLM may take.")

    @property
    def ranks(self) -> int:
        return 1


def _canary() -> Any:
    return Field(
        5.0,
        gt=0,
        description="Time in which an engine without other work must compute one token when its health is asked; "
        "after three health checks without an answer Serve restarts it.",
    )


class PrefillRoleSettings(RoleSettings, PrefillSettings):
    """The prefill worker."""

    canary_timeout_s: float = _canary()

    max_ongoing_requests: int = Field(
        1024,
        ge=1,
        description="As for all roles, and more than `max_queue`, so that a full queue is told, not waited for.",
    )

    @property
    def ranks(self) -> int:
        return self.tensor_parallel_size

    @model_validator(mode="after")
    def _tells_that_it_is_full(self) -> PrefillRoleSettings:
        if self.max_ongoing_requests <= self.max_queue:
            raise ValueError(
                f"max_ongoing_requests ({self.max_ongoing_requests}) must be more than max_queue ({self.max_queue}): "
                "else requests wait before the worker, which never says that it is full"
            )
        return self


class PatchSettings(RoleSettings, PatchFormSettings):
    """The patch compiler."""

    threads: int | None = Field(1, ge=1, description="OpenMP threads; few, because it works beside serving.")
    niceness: int = Field(15, ge=0, le=19, description="As for all roles: no request waits for patches.")


class DecodeRoleSettings(RoleSettings, DecodeSettings):
    """The decode worker, which gives way to prompts.

    A step reads all weights, for one sequence as for many. What waits meanwhile shares the next step: under load an
    answer's tokens come further apart, its first one sooner.
    """

    canary_timeout_s: float = _canary()
    max_ongoing_requests: int = Field(
        1024, ge=1, description="As for all roles, and more than what is generated at once: health checks find a place."
    )
    niceness: int = Field(
        10, ge=0, le=19, description="As for all roles: answers under way share steps between prompts."
    )

    @property
    def ranks(self) -> int:
        return self.tensor_parallel_size


class LibraryRoleSettings(RoleSettings):
    """The keeper of the library: deletion, expiry, statistics."""

    sweep_period_s: float = Field(60.0, gt=0, description="Seconds between looks for expired files and idle sessions.")
    catalogue_period_s: float = Field(
        5.0, gt=0, description="Seconds between looks for patches that others left in `library.directory`."
    )


class PrecomputeSettings(Settings):
    """The offline caching job; its engines are prefill engines (see `prefill`)."""

    workers: int = Field(1, ge=1, description="Workers, each with an engine of its own.")
    num_cpus: float = Field(0.1, ge=0, description="CPUs that Ray reserves for a worker.")
    num_gpus: float | None = Field(
        None,
        ge=0,
        description="GPUs that Ray reserves for a worker. None: as for a prefill worker by default.",
    )
    threads: int | None = Field(
        None, ge=1, description="OpenMP threads of a worker. None: the cluster's CPUs, divided by the workers."
    )
    entries_per_task: int = Field(16, ge=1, description="Entries that a worker is given at a time.")
    images_in_memory: int = Field(16, ge=1, description="Images that a worker prepares together; a larger set, alone.")
    storage_options: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="Options of fsspec's file systems by protocol, for manifests and images: {s3: {key: ..., ...}}.",
    )


class ElasticSettings(Settings):
    """KV of prompts and answers on decode workers, where a request does not say."""

    kv_budget: float = Field(1.0, ge=0.05, le=1, description="KV entries handed off per prompt token. 1: all.")
    policy: CompactionPolicy = Field(
        CompactionPolicy.EVICT, description="What a budget leaves; see the request's `orbit.elastic.policy`."
    )
    window: int | None = Field(
        None, ge=1, description="Generated tokens whose KV decode workers keep at least; None: all."
    )

    @field_validator("window")
    @classmethod
    def _has_windows(cls, window: int | None) -> int | None:
        if window is not None and (reason := refusal()) is not None:
            raise ValueError(reason)
        return window

    @property
    def compaction(self) -> Compaction:
        """As links are asked for it."""
        return Compaction(self.kv_budget, self.policy, self.window)


class RoutingSettings(Settings):
    """Choice among the replicas of prefill and decode."""

    enabled: bool = Field(
        True, description="By queues, chunks in memory and free KV. false: Ray Serve's power of two choices."
    )
    report_period_s: float = Field(
        1.0, gt=0, description="Seconds between two reports of a replica; one five times as old is not trusted."
    )
    hot_chunks: int = Field(
        2048,
        ge=0,
        description="Chunks in a prefill worker's memory that its report names at most, 8 bytes each; and as many "
        "beginnings of prompts in its blocks.",
    )


class AccessLogSettings(Settings):
    """Log of requests, without content, for `orbitserve compile-trace`."""

    directory: Path | None = Field(
        None, description="Where every ingress replica writes its access-*.jsonl. None: nothing is logged."
    )
    sample: float = Field(1.0, gt=0, le=1, description="Share of the requests with chunks that are logged.")
    max_file_bytes: int = Field(256 * MIB, ge=1, description="Bytes of a file before the next one is begun.")
    rotated_files: int = Field(
        3, ge=1, description="Full files that a replica keeps beside the one it writes; the oldest go."
    )
    max_bytes: int = Field(
        4096 * MIB, ge=1, description="Bytes of all logs in the directory, also of replicas that ended; the oldest go."
    )
    queue: int = Field(1024, ge=1, description="Lines that may wait for the disk; further ones are dropped.")
