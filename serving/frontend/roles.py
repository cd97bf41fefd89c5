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
    """Roles behind the fidelity routes. Both calls raise RoleUnavailable when a replica does not answer."""

    async def fidelity(self) -> ByReplica:
        """Measurements of every prefill replica, by its name."""

    async def allow(self, point: OperatingPoint) -> int:
        """Have the library's keeper allow an operating point; returns on how many prefill replicas it was disabled."""


class CompilingRoles(Protocol):
    """What this needs of the prefill role."""

    async def compiled(self) -> Mapping[str, CompileStats]:
        """What every prefill replica compiled, by its name. Raises RoleUnavailable when one does not answer."""


class Roles(FidelityRoles, CompilingRoles, Protocol):
    """What the ingress needs of the other roles.

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
        """Start loading what a prompt on its way will need; the images of which nothing is stored, as far as known."""

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
        """The linked KV is still wanted: its blocks must not be freed yet. What the worker knows of them."""

    async def abandon(self, transfer: dict[str, Any], readers: int) -> None:
        """The linked KV will not be read: let the prefill worker free its blocks."""

    async def check_health(self) -> None:
        """Raises RoleUnavailable when a role has no healthy replica."""
