"""A prefill worker in this process, to time its work without a service around it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from PIL import Image

if TYPE_CHECKING:
    from kvstore.library import Library
    from kvstore.records.patch_form import PatchForm
    from prefill_workers.engine.engine import PrefillEngine
    from prefill_workers.link.linker import Linker
    from prefill_workers.patches.patch_compiler import PatchJob
    from prefill_workers.protocol import LinkRequest, LinkResult
    from prefill_workers.scheduler.cost_model import ForwardCostModel
    from prefill_workers.scheduler.prefill_loop import PrefillLoop

TENANT = "local"
_SETTLE_SECONDS = 3600.0


@dataclass(frozen=True)
class Prompt:
    """A request over pictures, and their processed pixels."""

    request: LinkRequest
    items: Sequence[Any]

    def in_mode(self, mode: str) -> Prompt:
        """The same in another mode."""
        from prefill_workers.modes import Mode

        return replace(self, request=replace(self.request, mode=Mode.parse(mode)))


@dataclass(frozen=True)
class Worker:
    """Library, linker and loop of one engine."""

    engine: PrefillEngine
    library: Library
    linker: Linker
    loop: PrefillLoop

    def link(self, prompt: Prompt) -> LinkResult:
        """Link a prompt, encoding the pictures that the plan asks for, and let its blocks go."""
        from prefill_workers.protocol import PixelsNeeded

        try:
            plan = self.linker.plan(prompt.request)
        except PixelsNeeded as needed:
            encoded = self.engine.encode([prompt.items[i] for i in needed.chunks])
            plan = self.linker.plan(prompt.request, dict(zip(needed.chunks, encoded, strict=True)))
        result = self.loop.submit(plan).result()
        self.loop.abandon(result.lease)
        return result

    def settle(self) -> None:
        """Wait until everything that links have taught is stored."""
        from prefill_workers.scheduler.loop_stats import drain

        drain(self.loop, seconds=_SETTLE_SECONDS)
        self.library.flush()


@contextmanager
def worker(
    engine: PrefillEngine,
    library: Library,
    patches: PatchForm,
    submit_patch: Callable[[PatchJob], object] = lambda job: None,
    composing: Mapping[str, Any] = MappingProxyType({}),
    cost_model: ForwardCostModel | None = None,
    **limits: Any,
) -> Iterator[Worker]:
    """A worker that runs while the block does.

    `patches`: the form of those it finds and forms; `composing`: the linker's settings of sums; `limits`: of
    the loop, whose queue is one link long.
    """
    from prefill_workers.link.linker import Linker
    from prefill_workers.patches.harvester import Harvester
    from prefill_workers.scheduler.prefill_loop import PrefillLoop
    from prefill_workers.settings import LoopLimits

    linker = Linker(engine, library, patches, **composing)
    harvester = Harvester(engine, library, patches, submit_patch)
    usual: dict[str, Any] = {"budget": 4096, "max_queue": 1, "lease_seconds": 600}
    loop = PrefillLoop(linker, harvester, LoopLimits(**(usual | limits)), owner="bench", cost_model=cost_model)
    loop.start()
    try:
        yield Worker(engine, library, linker, loop)
    finally:
        loop.stop()


def prompt_over(engine: PrefillEngine, pictures: Sequence[Image.Image]) -> Prompt:
    """vLLM's own rendering of pictures with words between them, and the likeliest first token.

    The worker draws it, as it does for most requests of a service.
    """
    from vllm.renderers.inputs.preprocess import parse_model_prompt

    from prefill_workers.protocol import LinkRequest, Sampling
    from serving.frontend.prompt_segments import Delimiters, segment

    model = engine.config.model_config
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    body = "".join(f"Page {i}: {place}" for i in range(len(pictures)))
    prompt = {
        "prompt": f"<|im_start|>user\n{body}What changes?<|im_end|>\n<|im_start|>assistant\n",
        "multi_modal_data": {"image": list(pictures)},
        "multi_modal_uuids": {"image": [sha256(picture.tobytes()).hexdigest() for picture in pictures]},
    }
    renderer = engine._llm.llm_engine.renderer
    (rendered,) = renderer.render_cmpl([parse_model_prompt(model, prompt)], skip_mm_cache=True)
    segments = segment(rendered, Delimiters.of(model, renderer.get_tokenizer()))
    request = LinkRequest("bench", segments.token_ids, segments.chunks, tenant=TENANT, sampling=Sampling())
    return Prompt(request, segments.items)
