"""Blocks that are made from declarations: settings and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from serving.api import autoscale, compiling, fidelity, sessions
from serving.api.metrics import Metrics
from serving.config import OrbitServeConfig, shown_default
from serving.retrieval.metrics import RetrieverMetrics
from serving.routing.decode_policy import KV_USE
from serving.routing.policy import CHOICES
from serving.settings import MIB, RoleSettings
from tests.benchmarks.documents.records import markdown

ROLES = "roles"  # heads what the sections of all roles have
HEADER = ("setting", "default", "meaning")
_WHOSE = (
    "In the sections `ingress`, `vision` (VisionEncoder), `prefill` (PrefillWorker), `patch` (PatchCompiler), `decode` "
    "(DecodeWorker), `keeper` (LibraryKeeper, with the planner) and `retriever`, with these defaults unless they have "
    "others."
)


def settings() -> str:
    """Tables of all settings with default and meaning, one a section (`orbitserve config`)."""
    parts = [_section(ROLES, RoleSettings, _WHOSE)]
    alone = []
    for name, field in OrbitServeConfig.model_fields.items():
        model = _model_of(field)
        if model is None:
            alone.append((f"`{name}`", *_told(field)))
        else:
            parts.append(_section(name, model, _first_line(model)))
    parts.append(f"#### At the top level\n\n{markdown(HEADER, alone)}")
    return "\n\n".join(parts)


def _section(name: str, model: type[BaseModel], words: str) -> str:
    fields = ((path, field) for path, field in _fields(model, name) if not _same_in_all_roles(model, field, path))
    return f"#### {name}\n\n{words}\n\n" + markdown(HEADER, ((f"`{path}`", *_told(field)) for path, field in fields))


def _fields(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        path = name if prefix == ROLES else f"{prefix}.{name}"
        inner = _model_of(field)
        if inner is None:
            yield path, field
        else:
            yield from _fields(inner, path)


def _same_in_all_roles(model: type[BaseModel], field: FieldInfo, path: str) -> bool:
    if model is RoleSettings or not issubclass(model, RoleSettings):
        return False
    shared = RoleSettings.model_fields.get(path.rpartition(".")[2])
    return shared is not None and _told(shared) == _told(field)


def _model_of(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _told(field: FieldInfo) -> tuple[str, str]:
    default = shown_default(field)
    is_size = default.isdigit() and int(default) >= MIB and int(default) % MIB == 0
    size = f" ({int(default) // MIB} MiB)" if is_size else ""
    return f"`{default}`{size}", (field.description or "").replace("|", "\\|")


def _first_line(documented: Any) -> str:
    return (documented.__doc__ or "").strip().splitlines()[0]


def metrics() -> str:
    """Every series of `/metrics` that is ours, from where it is declared."""
    rows = []
    asked = [*fidelity.families({}), *compiling.families({}), *sessions.families({}), *autoscale.families({})]
    nothing: Any = SimpleNamespace(parts=0, vector_bytes=0, waiting=0, indexed=0, failed=0, degraded=0)
    asked += RetrieverMetrics(nothing).collect()
    for declared in [*vars(Metrics()).values(), CHOICES, KV_USE, *asked]:
        if isinstance(declared, CollectorRegistry):
            continue
        (described,) = declared.describe() if hasattr(declared, "describe") else [declared]
        name = described.name + ("_total" if described.type == "counter" else "")
        named = getattr(declared, "_labelnames", ())  # no public way to ask
        labels = (f"`{label}`" for label in named if label != "replica")
        rows.append((f"`{name}`", described.type, ", ".join(labels), described.documentation))
    return markdown(("series", "type", "labels beside `replica`", "meaning"), rows)


BLOCKS: dict[str, Callable[[], str]] = {"settings": settings, "metrics": metrics}
