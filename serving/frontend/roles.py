"""The roles that the front end calls, as protocols."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from typing import Any, Protocol

from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from prefill_workers.background.patch_precompiler import CompileStats
from prefill_workers.fidelity.monitor import PointStatus
from prefill_workers.modes import OperatingPoint
from prefill_workers.protocol import LeaseState, LinkRequest, LinkResult, PrefetchRequest

ByReplica = Mapping[str, Sequence[PointStatus]]


class FidelityRoles(Protocol):
    """The prefill role as the fidelity routes need it.

    Both methods raise RoleUnavailable when a replica does not answer.
    """

    async def fidelity(self) -> ByReplica:
        """Measurements of every prefill replica, by its name."""

    async def allow(self, point: OperatingPoint) -> int:
        """Allow an operating point again on every prefill replica.

        Returns on how many it was switched off.
        """


class CompilingRoles(Protocol):
    """The prefill role as the metrics of compiling need it."""

    async def compiled(self) -> Mapping[str, CompileStats]:
        """Counters of compiling ahead, by name of the prefill replica.

        Raises RoleUnavailable when one does not answer.
        """


class Roles(FidelityRoles, CompilingRoles, Protocol):
    """The other roles as the ingress needs them.

    | primitive  | role           | raises                                        |
    |------------|----------------|-----------------------------------------------|
    | `prefetch` | prefill worker | nothing: best effort                          |
    | `encode`   | vision encoder | RoleUnavailable                               |
    | `link`     | prefill worker | PixelsNeeded, Overloaded, RoleUnavailable     |
    | `generate` | decode worker  | ValueError (request too large), RoleUnavailable |
    | `renew`    | prefill worker | nothing: unknown if nobody tells               |
    | `abandon`  | decode worker  | nothing: best effort, leases end by time-out  |
    | `fidelity`, `allow`, `compiled` | prefill workers, all of them | RoleUnavailable |
    """

    async def prefetch(self, request: PrefetchRequest) -> Collection[str]:
        """Start loading the chunks of a prompt on its way.

        Returns the images of which nothing is stored, as far as known.
        """

    async def encode(self, items: Sequence[tuple[str, MultiModalKwargsItem]]) -> Sequence[Any]:
        """Embeddings of each processed image, in whatever form `link` of the same object accepts.

        Without vision encoders the images themselves: prefill workers encode what they link.
        """

    async def link(self, request: LinkRequest, indices: Sequence[int], embeddings: Sequence[Any]) -> LinkResult:
        """Link a request; `embeddings` (from `encode`) belong to the chunks at `indices`."""

    def generate(
        self, token_ids: list[int], transfer: dict[str, Any], params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Stream a decode engine's outputs for a linked prompt."""

    async def renew(self, lease: str) -> LeaseState:
        """Renew the lease on linked KV. Returns what the worker knows of it."""

    async def abandon(self, transfer: dict[str, Any], readers: int) -> None:
        """The linked KV will not be read: let the prefill worker free its blocks."""

    async def check_health(self) -> None:
        """Raise RoleUnavailable when a role has no healthy replica."""
