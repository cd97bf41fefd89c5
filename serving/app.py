"""The Ray Serve application: one deployment per role, and the graph between them.

| deployment     | holds                                     | called by              |
|----------------|-------------------------------------------|------------------------|
| Ingress        | vLLM's OpenAI server on our engine client | HTTP                   |
| VisionEncoder  | the vision tower (may be left out)        | Ingress                |
| PrefillWorker  | an engine over runs, the linker           | Ingress                |
| PatchCompiler  | nothing but a library                     | PrefillWorker          |
| DecodeWorker   | a stock, text-only vLLM engine            | Ingress                |
| LibraryKeeper  | deletion, expiry, disabled points         | Ingress, PrefillWorker |
| Retriever      | indices of vector stores (may be left out) | Ingress, itself       |

A request goes HTTP → Ingress → (VisionEncoder →) PrefillWorker → NIXL → DecodeWorker → Ingress → HTTP. Workers read and
write the library themselves; its data never passes through an actor.

`build_app` is what `serve run serving.app:build_app config=PATH` and `serve deploy` take.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from serving.config import ConfigError, OrbitServeConfig
from serving.replicas.decode import DecodeWorker
from serving.replicas.ingress import Ingress
from serving.replicas.library_keeper import LibraryKeeper
from serving.replicas.patch_compiler import PatchCompiler
from serving.replicas.prefill import PrefillWorker
from serving.replicas.retriever import Retriever
from serving.replicas.vision import VisionEncoder
from serving.routing.reports import router_config
from serving.scaling.roles import pinned, replicas
from serving.settings import RoleSettings


def build(config: OrbitServeConfig) -> serve.Application:
    """The application graph of a configuration."""
    compiler = _deployment(config, PatchCompiler, config.patch).bind(config)
    routers = {role: router_config(role, config.routing) for role in ("prefill", "decode")}
    prefill = _deployment(config, PrefillWorker, config.prefill, routers["prefill"]).bind(config, compiler)
    vision = (
        {"vision": _deployment(config, VisionEncoder, config.vision).bind(config)} if config.has_vision_encoder else {}
    )
    has_retriever = config.retriever.replicas > 0
    retriever = {"retriever": _deployment(config, Retriever, config.retriever).bind(config)} if has_retriever else {}
    return _deployment(config, Ingress, config.ingress).bind(
        config,
        **vision,
        **retriever,
        prefill=prefill,
        decode=_deployment(config, DecodeWorker, config.decode, routers["decode"]).bind(config),
        library=_deployment(config, LibraryKeeper, config.keeper).bind(config, prefill, compiler, **retriever),
    )


def build_app(arguments: dict[str, str]) -> serve.Application:
    """Application builder for `serve run serving.app:build_app config=PATH`.

    `pinned=true`: roles without `resources` ask for `orbitserve-ROLE`, which some nodes have (see `deploy.manifests`).
    Serve calls it again for other arguments alone: further ones, such as `revision`, mean nothing here.

    Raises:
        ValueError: no `config` argument.
        ConfigError: the file cannot be used, or has TLS files, which Serve takes among its own options alone.
    """
    if "config" not in arguments:
        raise ValueError("serve run serving.app:build_app needs config=PATH, the YAML of an OrbitServeConfig")
    config = OrbitServeConfig.from_yaml(Path(arguments["config"]))
    if config.http.tls_certificate is not None:
        raise ConfigError(
            f"{arguments['config']}: http.tls_certificate: Serve would answer in plain HTTP all the same; put "
            "ssl_certfile and ssl_keyfile into `http_options` of the file for `serve deploy` instead"
        )
    return build(pinned(config) if arguments.get("pinned") == "true" else config)


def _deployment(
    config: OrbitServeConfig, role: type, settings: RoleSettings, router: RequestRouterConfig | None = None
) -> Any:
    return serve.deployment(
        role,
        name=role.__name__,
        **replicas(config, role.__name__, settings),
        max_ongoing_requests=settings.max_ongoing_requests,
        health_check_period_s=settings.health_check_period_s,
        request_router_config=router or RequestRouterConfig(),
        max_replicas_per_node=settings.max_replicas_per_node,
        ray_actor_options={
            "num_cpus": settings.num_cpus,
            "num_gpus": settings.gpus,
            **({"memory": settings.reserved_memory_bytes} if settings.reserved_memory_bytes else {}),
            **({"resources": settings.resources} if settings.resources else {}),
            **({"label_selector": settings.label_selector} if settings.label_selector else {}),
        },
    )
