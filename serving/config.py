"""The configuration of a deployment: one model per role, composed here, loaded once at the edge.

`OrbitServeConfig.from_yaml` reads it; `orbitserve config` prints the defaults with their descriptions.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal

import yaml
from fsspec.core import split_protocol
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_core import to_jsonable_python

from decode_workers.settings import DecodeSettings
from infra.vllm_env import is_cpu_build
from kvstore.chunk import DYNAMIC_TENANT
from kvstore.settings import FileSettings, LibrarySettings
from prefill_workers.measured import BadMeasurements, Measured, composing
from prefill_workers.settings import PatchFormSettings, PrefillSettings, Weighing

MIB = 1 << 20


class ConfigError(ValueError):
    """A configuration file that cannot be used; the message names the field."""


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelSettings(_Settings):
    """The model that is served."""

    path: Path = Field(description="Directory of a Hugging Face checkpoint that vLLM can load.")
    served_name: str = Field("", description="Name in the API; empty: the directory's name.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Weights and KV; auto: as stored."
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
        if isinstance(values, dict) and not values.get("served_name") and "path" in values:
            return {**values, "served_name": Path(os.path.abspath(values["path"])).name}
        return values


class ApiKey(_Settings):
    """Who a bearer key stands for; a tenant's name alone means an ordinary key of that tenant."""

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


class HttpSettings(_Settings):
    """The HTTP surface and its limits."""

    host: str = Field("127.0.0.1", description="Address of Ray Serve's proxy.")
    port: int = Field(8000, ge=0, le=65535, description="Port of Ray Serve's proxy.")
    max_body_bytes: int = Field(128 * MIB, ge=1, description="Largest request body; larger ones are answered 413.")
    max_image_bytes: int = Field(20 * MIB, ge=1, description="Largest single image, as sent or uploaded.")
    max_document_bytes: int = Field(1 * MIB, ge=1, description="Largest single text document, as sent or uploaded.")
    max_image_pixels: int = Field(
        33_000_000, ge=1, le=178_956_970, description="Most pixels of an image, read from its header."
    )  # Pillow opens none with more
    max_request_pixels: int = Field(
        256_000_000, ge=1, description="Most pixels of all images of one request: decoded they take 4 bytes each."
    )
    max_images_per_request: int = Field(64, ge=1, description="Most images in one request.")
    max_concurrent_requests: int = Field(
        256,
        ge=1,
        description="Generations, tokenisations and uploads in progress on one ingress replica; further ones are "
        "answered 429.",
    )
    allow_http_images: bool = Field(
        False, description="Fetch http(s) image URLs. Private addresses are always refused."
    )
    http_image_timeout_s: float = Field(10.0, gt=0, description="Time allowed to fetch one image.")
    cors_origins: list[str] = Field(
        default_factory=list, description="Origins whose pages may call this from a browser; ['*']: all."
    )
    api_keys: dict[str, ApiKey] = Field(
        default_factory=dict,
        description="Bearer key to its tenant, or to {tenant: NAME, admin: true} for an administrator's. "
        "Empty: no key needed, one tenant named `local` who is the administrator: everybody who reaches the port.",
    )

    @property
    def max_file_bytes(self) -> int:
        """Most bytes of an uploaded file."""
        return max(self.max_image_bytes, self.max_document_bytes)


class RoleSettings(_Settings):
    """What every deployment has: how many replicas, and what each gets."""

    replicas: int = Field(1, ge=1, description="Replicas of the role.")
    num_cpus: float = Field(0.1, ge=0, description="CPUs that Ray reserves for a replica.")
    num_gpus: float | None = Field(
        None,
        ge=0,
        description="GPUs that Ray reserves for a replica. None: one for each rank of its engine where vLLM is a CUDA "
        "build (roles without an engine: none), else 0.",
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

    @property
    def ranks(self) -> int:
        """Ranks of the role's engine; 0: it has none."""
        return 0

    @property
    def gpus(self) -> float:
        """GPUs that Ray reserves for a replica; see `reserved_gpus`."""
        return reserved_gpus(self.num_gpus, self.ranks)


def reserved_gpus(asked: float | None, ranks: int) -> float:
    """GPUs of a process whose engine has so many ranks: as asked for, else one a rank where vLLM is a CUDA build."""
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
    replicas: int = Field(
        1, ge=0, description="Replicas of the role. 0: prefill workers encode the images that they link themselves."
    )
    niceness: int = Field(5, ge=0, le=19, description="As above: requests that came before are computed first.")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="Share of GPU memory that vLLM may take.")

    @property
    def ranks(self) -> int:
        return 1


class PrefillRoleSettings(RoleSettings, PrefillSettings):
    """The prefill worker."""

    max_ongoing_requests: int = Field(
        1024, ge=1, description="As above. More than `max_queue`, so that a full queue is told, not waited for."
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
    niceness: int = Field(15, ge=0, le=19, description="As above: no request waits for patches.")


class DecodeRoleSettings(RoleSettings, DecodeSettings):
    """The decode worker. It gives way to prompts: a step reads all weights, for one sequence as for many.

    What waits meanwhile shares the next step: under load an answer's tokens come further apart, its first one sooner.
    """

    max_ongoing_requests: int = Field(
        1024, ge=1, description="As above. More than what is generated at once, so that health checks find a place."
    )
    niceness: int = Field(10, ge=0, le=19, description="As above: answers under way share steps between prompts.")

    @property
    def ranks(self) -> int:
        return self.tensor_parallel_size


class LibraryRoleSettings(RoleSettings):
    """The keeper of the library: deletion, expiry, statistics."""

    sweep_period_s: float = Field(60.0, gt=0, description="Seconds between looks for expired files.")
    catalogue_period_s: float = Field(
        5.0, gt=0, description="Seconds between looks for patches that others left in `library.directory`."
    )


class PrecomputeSettings(_Settings):
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


class RoutingSettings(_Settings):
    """How requests choose among the replicas of prefill and decode."""

    enabled: bool = Field(
        True, description="By queues, chunks in memory and free KV. false: Ray Serve's power of two choices."
    )
    report_period_s: float = Field(
        1.0, gt=0, description="Seconds between two reports of a replica; one five times as old is not trusted."
    )
    hot_chunks: int = Field(
        2048, ge=0, description="Chunks in a prefill worker's memory that its report names at most, 8 bytes each."
    )


class AccessLogSettings(_Settings):
    """What requests brought, without content, for `orbitserve compile-trace`."""

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


class OrbitServeConfig(_Settings):
    """A whole deployment."""

    model: ModelSettings
    http: HttpSettings = HttpSettings()
    library: LibrarySettings = LibrarySettings()
    files: FileSettings = FileSettings()
    files_url: str = Field(
        ".orbitserve/files",
        description="Directory or fsspec URL of uploaded files, reached with `files.storage_options`; where these are "
        "empty and library.url has the same protocol, with the library's.",
    )
    ingress: IngressSettings = IngressSettings()
    vision: VisionSettings = VisionSettings()
    prefill: PrefillRoleSettings = PrefillRoleSettings()
    patch: PatchSettings = PatchSettings()
    decode: DecodeRoleSettings = DecodeRoleSettings()
    routing: RoutingSettings = RoutingSettings()
    keeper: LibraryRoleSettings = LibraryRoleSettings()
    precompute: PrecomputeSettings = PrecomputeSettings()
    access_log: AccessLogSettings = AccessLogSettings()

    @model_validator(mode="after")
    def _tells_that_it_is_full(self) -> OrbitServeConfig:
        answered, taken = self.http.max_concurrent_requests, self.ingress.max_ongoing_requests
        if answered >= taken:
            raise ValueError(
                f"ingress.max_ongoing_requests ({taken}) must be more than http.max_concurrent_requests ({answered}): "
                "else requests wait before the ingress, which never answers 429"
            )
        return self

    @model_validator(mode="after")
    def _one_secret(self) -> OrbitServeConfig:
        """Content ids of files and of images in requests are made with one secret, whichever section says it."""
        ours, theirs = self.library.salt_secret, self.files.salt_secret
        if not theirs.get_secret_value():
            object.__setattr__(self, "files", self.files.model_copy(update={"salt_secret": ours}))
        elif ours.get_secret_value() not in ("", theirs.get_secret_value()):
            raise ValueError("library.salt_secret and files.salt_secret differ; set one of them")
        return self

    @model_validator(mode="after")
    def _one_storage(self) -> OrbitServeConfig:
        """Files behind a URL like the library's are reached as it is, unless they have options of their own."""
        protocol = split_protocol(self.files_url)[0]
        if protocol and not self.files.storage_options and protocol == split_protocol(self.library.url or "")[0]:
            shared = {"storage_options": self.library.storage_options}
            object.__setattr__(self, "files", self.files.model_copy(update=shared))
        return self

    @property
    def composing(self) -> Measured:
        """How pair patches are summed: as configured, or as was measured for the model.

        Raises:
            BadMeasurements: what lies beside the model's weights cannot be used.
        """
        return composing(self.model.path, self.prefill.compose_up_to, self.prefill.weigh_by)

    @property
    def compose_up_to(self) -> int:
        """Behind how many chunks pair patches are summed; see `composing`."""
        return self.composing.compose_up_to

    @property
    def weigh_by(self) -> Weighing:
        """What weighs the pair patches of a sum; see `composing`."""
        return self.composing.weigh_by

    @property
    def sums_up_to(self) -> int:
        """Behind how many chunks placement may count on sums: patches without the first layers cannot be weighed."""
        return self.compose_up_to if self.patch.depth == 1 else 0

    @classmethod
    def from_yaml(cls, path: Path) -> OrbitServeConfig:
        """Read a configuration file.

        Raises:
            ConfigError: the file is missing, is not YAML, or a field is unknown or wrong (the message names it).
        """
        return cls.load(path)

    @classmethod
    def load(
        cls,
        path: Path | None,
        model: Path | None = None,
        host: str | None = None,
        port: int | None = None,
        workers: int | None = None,
        max_model_len: int | None = None,
    ) -> OrbitServeConfig:
        """Read a configuration file, if there is one, and put the given values over it.

        Raises:
            ConfigError: see `from_yaml`; or no model is named anywhere, or what was measured of it cannot be used.
        """
        values: dict[str, Any] = _read(path) if path is not None else {}
        source = str(path) if path is not None else "the command line"
        for section, name, value in (
            ("model", "path", model),
            ("model", "max_model_len", max_model_len),
            ("http", "host", host),
            ("http", "port", port),
            ("precompute", "workers", workers),
        ):
            found = values.get(section) or {}
            if not isinstance(found, dict):
                raise ConfigError(f"{source}: {section}: {found!r} should be settings, such as `{name}: ...`")
            values[section] = found if value is None else {**found, name: value}
        if not values["model"].get("path"):
            raise ConfigError(f"{source}: model.path: no checkpoint is named; pass --model PATH or a configuration")
        try:
            config = cls.model_validate(values)
        except ValidationError as error:
            problems = (f"{_place(e['loc']) or 'the file'}: {e['msg']}" for e in error.errors())
            raise ConfigError(f"{source}: " + "; ".join(problems)) from None  # the cause quotes API keys
        if not (config.model.path / "config.json").exists():
            raise ConfigError(
                f"{source}: model.path: {config.model.path} holds no config.json; it must be the directory of a "
                "checkpoint. `hf download NAME --local-dir DIR` gets the one that a hub calls NAME"
            )
        config = config._anchored()
        try:
            _ = config.composing
        except BadMeasurements as error:
            raise ConfigError(f"{source}: model.path: {error}") from error
        return config

    def _anchored(self) -> OrbitServeConfig:
        """The same with absolute paths: a cluster's workers have another working directory."""
        model, library, log = self.model, self.library, self.access_log
        template = model.chat_template
        if template is not None and os.path.isfile(template):  # it may be the text itself, too long for a path
            template = os.path.abspath(template)
        return self.model_copy(
            update={
                "model": model.model_copy(update={"path": model.path.absolute(), "chat_template": template}),
                "library": library.model_copy(
                    update={"directory": _absolute(library.directory), "url": _absolute_url(library.url)}
                ),
                "files_url": _absolute_url(self.files_url),
                "access_log": log.model_copy(update={"directory": _absolute(log.directory)}),
            }
        )

    def to_yaml(self) -> str:
        """The configuration as YAML; secrets are left out: API keys, salts and the storages' options."""
        values = self.model_dump(mode="json", exclude_none=True)
        values["http"].pop("api_keys")
        for section in (values["library"], values["files"], values["precompute"]):
            section.pop("salt_secret", None)
            section.pop("storage_options")
        return yaml.safe_dump(values, sort_keys=False)


def _place(location: tuple[str | int, ...]) -> str:
    """A field's name with those of its sections. An API key in it is not said."""
    if location[:2] == ("http", "api_keys") and len(location) > 2:
        location = (*location[:2], "***", *location[3:])
    return ".".join(map(str, location))


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()


def _absolute_url(url: str | None) -> str | None:
    """A URL as it is; of a plain path the absolute one."""
    return url if url is None or "://" in url or "::" in url else str(Path(url).absolute())


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if values is not None and not isinstance(values, dict):
        raise ConfigError(f"{path}: expected sections such as `model:`, found {type(values).__name__}")
    return values or {}


def documented(model: type[BaseModel], indent: int = 0) -> str:
    """Every field of a settings model with its default and description, as commented YAML."""
    lines: list[str] = []
    pad = " " * indent
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            lines += [f"{pad}{name}:  # {(kind.__doc__ or '').strip().splitlines()[0]}", documented(kind, indent + 2)]
            continue
        default = field.get_default(call_default_factory=True)
        if field.is_required():
            shown = "<required>"
        elif isinstance(default, SecretStr):
            shown = '""'
        else:
            shown = re.sub(
                r"\n\.\.\.$",
                "",
                yaml.safe_dump(to_jsonable_python(default), default_flow_style=True, sort_keys=False).strip(),
            )
        lines.append(f"{pad}{name}: {shown}  # {field.description}")
    return "\n".join(lines)
