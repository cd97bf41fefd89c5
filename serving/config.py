"""The configuration of a deployment: one settings model per role, loaded once at the edge.

`OrbitServeConfig.from_yaml` reads it; `orbitserve config` prints the defaults with their descriptions.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from fsspec.core import split_protocol
from pydantic import BaseModel, Field, SecretStr, ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from autoscale.settings import AutoscaleSettings
from autoscale.settings import Mode as AutoscaleMode
from infra.models import resolve
from infra.models.errors import ModelUnavailable
from infra.vllm_env import is_cpu_build
from kvstore.settings import FileSettings, LibrarySettings
from prefill_workers.model_card import BadModelCard, ModelCard, composition_for
from prefill_workers.settings import Weighing
from serving.api_keys import BadKeys, KeyRing
from serving.documents.settings import DocumentSettings, VideoSettings
from serving.retrieval.settings import RetrieverSettings
from serving.settings import (
    AccessLogSettings,
    DecodeRoleSettings,
    ElasticSettings,
    HttpSettings,
    IngressSettings,
    LibraryRoleSettings,
    ModelSettings,
    PatchSettings,
    PrecomputeSettings,
    PrefillRoleSettings,
    ReplicaRange,
    RoutingSettings,
    Settings,
    TenantsSettings,
    VisionSettings,
)


class ConfigError(ValueError):
    """A configuration file that cannot be used; the message names the field."""


class OrbitServeConfig(Settings):
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
    vision: VisionSettings = Field(default_factory=VisionSettings)
    prefill: PrefillRoleSettings = PrefillRoleSettings()
    patch: PatchSettings = PatchSettings()
    decode: DecodeRoleSettings = DecodeRoleSettings()
    elastic: ElasticSettings = ElasticSettings()
    routing: RoutingSettings = RoutingSettings()
    keeper: LibraryRoleSettings = LibraryRoleSettings()
    precompute: PrecomputeSettings = PrecomputeSettings()
    access_log: AccessLogSettings = AccessLogSettings()
    documents: DocumentSettings = DocumentSettings()
    video: VideoSettings = VideoSettings()
    retriever: RetrieverSettings = RetrieverSettings()
    tenants: TenantsSettings = TenantsSettings()
    autoscale: AutoscaleSettings = AutoscaleSettings()

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
    def _fixed_where_nothing_plans(self) -> OrbitServeConfig:
        for name in ("ingress", "keeper", "patch", "retriever"):
            if isinstance(getattr(self, name).replicas, ReplicaRange):
                raise ValueError(
                    f"{name}.replicas: prefill, decode and vision follow the load, no other role does; give a number"
                )
        return self

    @model_validator(mode="after")
    def _as_many_writers(self) -> OrbitServeConfig:
        """All replicas that write to the library's tiers leave room for one another, and for a caching job."""
        own = self.prefill.most_replicas + self.patch.most_replicas + 1
        if own > self.library.writers:
            object.__setattr__(self, "library", self.library.model_copy(update={"writers": own}))
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
    def has_vision_encoder(self) -> bool:
        """True if images go to vision encoders; else prefill workers encode them."""
        return self.vision.most_replicas > 0 and not self.model.is_text_only

    @property
    def places(self) -> int | None:
        """Most answers in progress on one ingress replica; None: there is but one tenant."""
        if not self.http.has_tenants:
            return None
        decode = self.decode
        replicas = decode.most_replicas if self.autoscale.mode is AutoscaleMode.ACT else decode.least_replicas
        running = self.tenants.running or decode.max_num_seqs * replicas
        return -(-running // self.ingress.least_replicas)

    @property
    def composing(self) -> ModelCard:
        """Composition of pair patches: as configured, or as was measured for the model.

        Raises:
            BadModelCard: what lies beside the model's weights cannot be used.
        """
        return composition_for(self.model.path, self.prefill.compose_up_to, self.prefill.weigh_by)

    @property
    def compose_up_to(self) -> int:
        """Behind how many chunks pair patches are summed; see `composing`."""
        return self.composing.compose_up_to

    @property
    def weigh_by(self) -> Weighing:
        """Source of the weights of pair patches in a sum; see `composing`."""
        return self.composing.weigh_by

    @property
    def is_forming_in_prefill(self) -> bool:
        """True if patches form in the prefill workers, on the GPU of each.

        Not where `patch.num_gpus` says where else, ranks split the KV, or one process has to pool all into a basis.
        """
        patch = self.patch
        elsewhere = patch.num_gpus is not None or patch.pool_basis or patch.basis is not None
        return not (is_cpu_build() or elsewhere or self.prefill.tensor_parallel_size > 1)

    @property
    def sums_up_to(self) -> int:
        """Most antecedents of a composed chunk; 0 where patches lack the layers to weigh them by."""
        return self.compose_up_to if self.patch.depth == 1 else 0

    @classmethod
    def from_yaml(cls, path: Path) -> OrbitServeConfig:
        """Read a configuration file.

        Raises:
            ConfigError: the file is missing, is not YAML, or a field is unknown or wrong (the message names it).
        """
        return cls.load(path)

    @classmethod
    def load(cls, path: Path | None, overrides: Mapping[str, Any] | None = None) -> OrbitServeConfig:
        """Read a configuration file, if any, with `overrides`; gets the model if it is a name.

        Args:
            overrides: by a setting's name with its section, as `http.port`; those that are None say nothing.

        Raises:
            ConfigError: see `from_yaml`; or no model is named anywhere, it is not to be had, or what was measured of it
                cannot be used.
        """
        values: dict[str, Any] = _read(path) if path is not None else {}
        source = str(path) if path is not None else "the command line"
        for name, value in {"model.path": None, **(overrides or {})}.items():
            section, field = name.split(".")
            found = values.get(section) or {}
            if not isinstance(found, dict):
                raise ConfigError(f"{source}: {section}: {found!r} should be settings, such as `{field}: ...`")
            values[section] = found if value is None else {**found, field: value}
        if not values["model"].get("path"):
            raise ConfigError(f"{source}: model.path: no model is named, neither here nor on the command line")
        try:
            config = cls.model_validate(values)
        except ValidationError as error:
            problems = (f"{_place(e['loc']) or 'the file'}: {e['msg']}" for e in error.errors())
            raise ConfigError(f"{source}: " + "; ".join(problems)) from None  # the cause quotes API keys
        try:
            path, name = resolve(str(config.model.path))
        except ModelUnavailable as error:
            raise ConfigError(f"{source}: model.path: {error}") from error
        if not name or values["model"].get("served_name"):
            name = config.model.served_name
        model = config.model.model_copy(update={"path": path, "served_name": name})
        config = config.model_copy(update={"model": model})._anchored()
        try:
            _ = config.composing
        except BadModelCard as error:
            raise ConfigError(f"{source}: model.path: {error}") from error
        try:
            KeyRing.of(config.http)
        except BadKeys as error:
            raise ConfigError(f"{source}: {error}") from error
        return config

    def _anchored(self) -> OrbitServeConfig:
        """The same with absolute paths: a cluster's workers have another working directory."""
        model, library, log, http = self.model, self.library, self.access_log, self.http
        scaling = self.autoscale
        template = model.chat_template
        if template is not None and os.path.isfile(file := os.path.expanduser(template)):
            template = os.path.abspath(file)  # else it is the text itself, which may be too long for a path
        directory = library.directory and _absolute(library.directory)
        retriever, kind = self.retriever, "path:"
        if retriever.embedder.startswith(kind):
            folder = _absolute(Path(retriever.embedder.removeprefix(kind)))
            retriever = retriever.model_copy(update={"embedder": f"{kind}{folder}"})
        files = ("api_keys_file", "tls_certificate", "tls_key")
        of_http = {name: _absolute(file) for name in files if (file := getattr(http, name)) is not None}
        return self.model_copy(
            update={
                "http": http.model_copy(update=of_http),
                "model": model.model_copy(update={"path": _absolute(model.path), "chat_template": template}),
                "library": library.model_copy(update={"directory": directory, "url": _absolute_url(library.url)}),
                "files_url": _absolute_url(self.files_url),
                "access_log": log.model_copy(update={"directory": log.directory and _absolute(log.directory)}),
                "retriever": retriever,
                "autoscale": scaling.model_copy(update={"log": scaling.log and _absolute(scaling.log)}),
            }
        )

    def to_yaml(self) -> str:
        """The configuration as YAML, without secrets: API keys, salts and storage options."""
        values = self.model_dump(mode="json", exclude_none=True)
        values["http"].pop("api_keys")
        for section in (values["library"], values["files"], values["precompute"]):
            section.pop("salt_secret", None)
            section.pop("storage_options")
        values["retriever"].pop("embedder_key")
        return yaml.safe_dump(values, sort_keys=False)


def _place(location: tuple[str | int, ...]) -> str:
    """A field's name with those of its sections. An API key in it is not said."""
    if location[:2] == ("http", "api_keys") and len(location) > 2:
        location = (*location[:2], "***", *location[3:])
    return ".".join(map(str, location))


def _absolute(path: Path) -> Path:
    """The path from the root; `~` is the home directory."""
    return Path(os.path.expanduser(path)).absolute()


def _absolute_url(url: str | None) -> str | None:
    """A URL as it is; of a plain path the absolute one."""
    return url if url is None or "://" in url or "::" in url else str(_absolute(Path(url)))


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


def setting_of_keys(path: Path | None) -> str | None:
    """Name of the setting by which a configuration file has API keys; None: it has none.

    Raises ConfigError if the file cannot be read.
    """
    http = _read(path).get("http") if path is not None else None
    if not isinstance(http, dict):
        return None
    return next((f"http.{name}" for name in ("api_keys", "api_keys_file") if http.get(name)), None)


def documented(model: type[BaseModel], indent: int = 0) -> str:
    """Every field of a settings model with its default and description, as commented YAML."""
    lines: list[str] = []
    pad = " " * indent
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            lines += [f"{pad}{name}:  # {(kind.__doc__ or '').strip().splitlines()[0]}", documented(kind, indent + 2)]
            continue
        lines.append(f"{pad}{name}: {shown_default(field)}  # {field.description}")
    return "\n".join(lines)


def shown_default(field: FieldInfo) -> str:
    """A setting's default as YAML in one line; no secret is shown."""
    if field.is_required():
        return "<required>"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, SecretStr):
        return '""'
    shown = yaml.safe_dump(to_jsonable_python(default), default_flow_style=True, sort_keys=False, width=math.inf)
    return re.sub(r"\n\.\.\.$", "", shown.strip())
