"""A prefill worker without Ray around it: real engine, real library, real linker, one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from vllm import SamplingParams
from vllm.renderers import BaseRenderer
from vllm.renderers.inputs.preprocess import parse_model_prompt

from infra.checkpoints import checkpoint_path
from infra.families import FAMILIES, Family
from kvstore.library import Library
from kvstore.records.patch_form import PatchForm
from kvstore.settings import FactorType, LibrarySettings
from prefill_workers.engine.batch import Attending
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.engine.spec import EngineSpec
from prefill_workers.fidelity.monitor import Fidelity
from prefill_workers.link.linker import Linker
from prefill_workers.link.plan import LinkPlan
from prefill_workers.modes import Mode
from prefill_workers.patches.harvester import Harvester
from prefill_workers.patches.patch_compiler import PatchCompiler
from prefill_workers.protocol import LinkRequest, LinkResult, PixelsNeeded
from prefill_workers.scheduler.loop_stats import drain
from prefill_workers.scheduler.prefill_loop import PrefillLoop
from prefill_workers.sequence import Embedded, LinkSequence, Run
from prefill_workers.settings import CompileLimits, FidelitySettings, LoopLimits, Weighing
from serving.documents.video import video_metadata
from serving.frontend.documents import Document, Documents
from serving.frontend.prompt_segments import Delimiters, Segments, segment

BLOCK_SIZE = 32
MAX_MODEL_LEN = 2048
QWEN2_5_VL = FAMILIES["qwen2_5_vl"]
MIXED = [  # prompts: text, and numbers of test images
    ["Only text, and not much of it."],
    ["One ", 1, " picture."],
    ["Two ", 2, " pictures ", 3, " here."],
    ["A longer text " * 12],
    [0, 1, 2, "Three in a row."],
]


@dataclass(frozen=True)
class Page:
    """A test document; every number has its own text and, up to 3, its own length."""

    number: int

    @property
    def content(self) -> str:
        return f"{self.number:064x}"

    @property
    def text(self) -> str:
        letters = np.random.default_rng(self.number).integers(97, 123, 60 + 20 * (self.number % 4))
        return f"Page {self.number}: {bytes(letters.tolist()).decode()}."


@dataclass(frozen=True)
class Clip:
    """A test video of noise, sampled at 2 frames a second from `start` seconds on."""

    number: int
    frames: int = 4
    start: int = 0

    @property
    def content(self) -> str:
        return f"{self.number:062x}{self.start:02x}"

    @property
    def decoded(self) -> tuple[np.ndarray, dict]:
        noise = np.random.default_rng(self.number).random((self.frames, 112, 84, 3))
        indices = [self.start * 4 + 2 * i for i in range(self.frames)]
        return (noise * 255).astype("uint8"), video_metadata(indices, 4.0, indices[-1] + 2)


T = TypeVar("T")
Part = str | int | Page | Clip  # text, the number of a test image, a document, or a video


def tiny_engine(dtype: str, family: Family = QWEN2_5_VL, **options) -> PrefillEngine:
    """A family's tiny model without hand-off: several such engines live in one process."""
    spec = {
        "dtype": dtype,
        "max_model_len": MAX_MODEL_LEN,
        "block_size": BLOCK_SIZE if family.layout == "gqa" else None,
        "trust_remote_code": family.trust_remote_code,
        "kv_cache_gib": 1,
        "gpu_memory_utilization": 0.3,
        "hand_off": False,
    }
    return PrefillEngine(EngineSpec(model=str(checkpoint_path(family.checkpoint)), **{**spec, **options}))


def image(number: int) -> Image.Image:
    """A noisy picture; every number has its own pixels and, up to 4, its own size."""
    pixels = np.random.default_rng(number).random((224 + 28 * (number % 4), 168 + 28 * (number % 3), 3))
    return Image.fromarray((pixels * 255).astype("uint8"))


def vllm_prompt(parts: Sequence[Part], documents: Documents, family: Family) -> tuple[dict, list[Document]]:
    """The parts as a user's turn, in the form `LLM.generate` takes, and the documents among them."""

    def written(part: Part) -> str:
        if isinstance(part, Page):
            return documents.mark(part.content, part.text)
        if isinstance(part, Clip):
            return family.video
        return family.image if isinstance(part, int) else part

    text = f"<|im_start|>user\n{''.join(map(written, parts))}<|im_end|>\n<|im_start|>assistant\n"
    images = [part for part in parts if isinstance(part, int)]
    clips = [part for part in parts if isinstance(part, Clip)]
    prompt: dict = {"prompt_token_ids": documents.token_ids(text)}
    data: dict = {"image": [image(number) for number in images]} if images else {}
    uuids: dict = {"image": [f"{number:064x}" for number in images]} if images else {}
    if clips:
        data["video"], uuids["video"] = [clip.decoded for clip in clips], [clip.content for clip in clips]
    if data:
        prompt |= {"multi_modal_data": data, "multi_modal_uuids": uuids}
    return prompt, documents.marked([text])


@dataclass
class Linked:
    """A finished link: what the loop reported, the KV it left in the cache, and the prompt's next-token logits."""

    result: LinkResult
    plan: LinkPlan
    kv: Tensor  # [layers, tokens, features]
    logprobs: Tensor  # [vocabulary]

    @property
    def points(self) -> list[str]:
        return [str(chunk.operating_point) for chunk in self.result.chunks]

    def chunk_kv(self, index: int) -> Tensor:
        span = self.plan.request.chunks[index]
        return self.kv[:, span.start : span.stop]


def taken(options: dict[str, Any], kind: type) -> dict[str, Any]:
    """The options that are fields of a dataclass, taken out of `options`."""
    return {field.name: options.pop(field.name) for field in fields(kind) if field.name in options}


class Rig:
    """One prefill worker. Its methods must not be called while links are running: the engine has one driver."""

    def __init__(
        self,
        engine: PrefillEngine,
        directory: Path,
        rank: int | None = None,
        library: Library | None = None,
        form: PatchForm | None = None,
        family: Family = QWEN2_5_VL,
        fidelity: FidelitySettings | None = None,
        compose_up_to: int = 0,
        keeps_prefixes: bool = False,
        weigh_by: Weighing = Weighing.KV,
        **loop_options,
    ) -> None:
        self.engine, self.family = engine, family
        self.documents = Documents(engine._llm.get_tokenizer())
        self.library = library or Library(LibrarySettings(directory=directory), engine.fingerprint)
        form = form or PatchForm(rank, factors=FactorType.model)
        self.compiler = PatchCompiler(self.library, form)
        self.fidelity = Fidelity(fidelity or FidelitySettings(share=0))
        self.linker = Linker(engine, self.library, form, self.fidelity, compose_up_to, keeps_prefixes, weigh_by)
        self.harvester = Harvester(engine, self.library, form, self.compiler.compile)
        usual: dict[str, Any] = {
            "compiles": CompileLimits(**taken(loop_options, CompileLimits)),
            "budget": 4096,
            "max_queue": 64,
            "lease_seconds": 600.0,
            "patience_seconds": 0.0,
        }
        limits = LoopLimits(**(usual | taken(loop_options, LoopLimits)))
        self.loop = PrefillLoop(self.linker, self.harvester, limits, owner="rig", **loop_options)
        self.loop.start()

    def close(self) -> None:
        self.loop.stop()
        self.library.close()

    @property
    def renderer(self) -> BaseRenderer:
        return self.engine._llm.llm_engine.renderer

    @cached_property
    def delimiters(self) -> Delimiters:
        return Delimiters.of(self.renderer.model_config, self.renderer.get_tokenizer())

    def render(self, parts: Sequence[Part]) -> Segments:
        """vLLM's own rendering and processing of a prompt, cut into segments."""
        prompt, documents = vllm_prompt(parts, self.documents, self.family)
        parsed = parse_model_prompt(self.renderer.model_config, prompt)
        (rendered,) = self.renderer.render_cmpl([parsed], skip_mm_cache=True)
        return segment(rendered, self.delimiters, documents)

    def plan(self, parts: Sequence[Part] | Segments, mode: str = "auto", **request) -> LinkPlan:
        """A plan, with the pixels encoded that it asks for."""
        return self._with_pixels(parts, mode, request, lambda plan: plan)

    def link(self, parts: Sequence[Part] | Segments, mode: str = "auto", **request) -> Linked:
        """Link one prompt, wait until what it taught is stored, and free its blocks."""
        return self._with_pixels(
            parts, mode, request, lambda plan: self.finish(plan, self.loop.submit(plan).result(60))
        )

    def _with_pixels(
        self, parts: Sequence[Part] | Segments, mode: str, request: dict, work: Callable[[LinkPlan], T]
    ) -> T:
        """Plan and do `work`, again with the pixels that either asks for."""
        segments = parts if isinstance(parts, Segments) else self.render(parts)
        embeddings = dict[int, Tensor]()
        asked = LinkRequest("test", segments.token_ids, segments.chunks, Mode.parse(mode), **request)
        while True:
            try:
                return work(self.linker.plan(asked, embeddings))
            except PixelsNeeded as needed:
                if embeddings.keys() & set(needed.chunks):
                    raise
                encoded = self.engine.encode(segments.pixels(needed.chunks))
                embeddings |= dict(zip(needed.chunks, encoded, strict=True))

    def answer(
        self, parts: Sequence[Part] | Segments, token_ids: Sequence[int], count: int, mode: str = "auto"
    ) -> tuple[Linked, list[int]]:
        """Link one prompt, and say the likeliest `count` tokens behind it, one by one, of those in `token_ids`."""

        def work(plan: LinkPlan) -> tuple[Linked, list[int]]:
            result = self.loop.submit(plan).result(60)
            self.settle()
            room, said, sequence = self.loop._pool.allocate(count), list[int](), plan.sequence
            ids, positions, blocks = sequence.token_ids, sequence.positions, [*sequence.blocks, *room.blocks]
            for _ in range(count):
                whole, n = LinkSequence(ids, positions, blocks, sequence.embedded), len(ids)
                (logits,) = self.engine.logits([(whole, [Run(n - 1, n)])])
                said.append(token_ids[int(logits[list(token_ids)].argmax())])
                ids = torch.cat([ids, ids.new_tensor(said[-1:])])
                positions = torch.cat([positions, positions.new_full((*positions.shape[:-1], 1), n)], -1)
            self.loop._pool.abandon(room.id)
            return self.finish(plan, result), said

        return self._with_pixels(parts, mode, {}, work)

    def finish(self, plan: LinkPlan, result: LinkResult) -> Linked:
        """Read what a link left in the cache, then let its blocks go."""
        self.settle()
        n, blocks = len(plan.sequence), plan.sequence.blocks
        kv = self.engine.read_kv(blocks, 0, n)
        whole = LinkSequence(plan.sequence.token_ids, plan.sequence.positions, blocks, plan.sequence.embedded)
        logprobs = self.engine.logits([(whole, [Run(n - 1, n)])])[-1].log_softmax(-1)
        self.loop.abandon(result.lease)
        return Linked(result, plan, kv, logprobs)

    def attended(self, parts: Sequence[Part]) -> Tensor:
        """`PrefillEngine.attend_first` of a prompt's last chunk to those before it: [2, others, tokens]."""
        plan = self.plan(parts, "off")
        *before, last = (Run(chunk.span.start, chunk.span.stop) for chunk in plan.chunks)
        blocks = range(1, 2 + len(plan.sequence) // self.engine.block_size)
        sequence = LinkSequence(plan.sequence.token_ids, plan.sequence.positions, blocks, plan.sequence.embedded)
        asked = Attending(last, last.start, blocks, tuple(before))
        (shares,) = self.engine.attend_first([(sequence, [Run(0, last.stop)])], [asked])
        return shares

    def settle(self) -> None:
        """Wait until the loop is idle and everything it learnt is stored."""
        drain(self.loop)
        self.library.flush()

    def wait_until_free(self, seconds: float = 60.0) -> None:
        """Wait until decode engines have told that they read everything."""
        deadline = time.monotonic() + seconds
        while self.loop.stats().leases and time.monotonic() < deadline:
            time.sleep(0.01)

    def vllm_logprobs(self, parts: Sequence[Part], top: int = 20) -> dict[int, float]:
        """vLLM's own multimodal prefill in the same engine. Uses any block of the pool: call it before linking."""
        assert self.loop.stats().leases == 0
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=top, detokenize=False)
        prompt, _ = vllm_prompt(parts, self.documents, self.family)
        (answer,) = self.engine._llm.generate([prompt], params, use_tqdm=False)
        return {token: entry.logprob for token, entry in answer.outputs[0].logprobs[0].items()}


def apart(a: Tensor, b: Tensor) -> float:
    """Largest difference between two tensors, relative to the largest element of the second."""
    return float((a.float() - b.float()).abs().max() / b.float().abs().max())


def lone(rig: Rig, part: Part, shift: int) -> Tensor:
    """KV [layers, tokens, features] of one chunk computed alone, its first token at position `shift`."""
    plan = rig.plan([part], "off")
    (chunk,) = plan.chunks
    span = chunk.span
    blocks = range(1, 2 + (span.stop - span.start) // rig.engine.block_size)
    embedded = () if chunk.embeddings is None else (Embedded(span.first - span.start, chunk.embeddings, span.is_embed),)
    sequence = LinkSequence(
        plan.sequence.token_ids[span.start : span.stop],
        plan.sequence.positions[..., span.start : span.stop] - chunk.start_position + shift,
        blocks,
        embedded,
    )
    rig.engine.forward([(sequence, [Run(0, len(sequence))])])
    return rig.engine.read_kv(blocks, 0, len(sequence))


def unit_in_the_last_place(x: Tensor) -> Tensor:
    """Spacing of bfloat16 numbers at `x`."""
    return torch.exp2(x.abs().clamp_min(2.0**-126).log2().floor() - 7)


def all_free(rig: Rig) -> bool:
    """Whether nobody holds a block."""
    stats = rig.loop.stats()
    return stats.blocks_free == stats.blocks_total and stats.leases == 0


def fill(rig: Rig) -> list[str]:
    """Leases of all blocks that are free."""
    taken = []
    while rig.loop._pool.free:
        taken.append(rig.loop._pool.allocate(32 * min(rig.loop._pool.free, MAX_MODEL_LEN // 32)).id)
    return taken
