"""The forward over runs on a device that counts: from plan to logits nothing waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor

from kvstore.operator.apply import relocate
from kvstore.operator.device_kernel import Placement
from kvstore.operator.layout import Layout
from kvstore.operator.rotary import RotaryScheme
from prefill_workers.engine import worker_extension
from prefill_workers.engine.batch import assemble
from prefill_workers.engine.copy_stream import PinnedRing
from prefill_workers.engine.device_timer import DeviceTimer
from prefill_workers.engine.pages import Pages
from prefill_workers.engine.rank_calls import RankCalls
from prefill_workers.engine.worker_extension import WorkerExtension
from prefill_workers.link.plan import LinkPlan
from prefill_workers.protocol import LinkRequest
from prefill_workers.sequence import Embedded, LinkSequence, Run
from tests.counting_device import CountingDevice, StreamEvent

LAYERS, HIDDEN, SIZE, CAPTURED = 3, 8, 16, 32


class Layer(nn.Module):
    """A layer that keeps KV: one row of numbers a token."""

    def __init__(self, cache: Tensor) -> None:
        super().__init__()
        self.kv_cache = cache
        self.kv_cache_dtype = "auto"
        self.impl = SimpleNamespace(do_kv_cache_update=self.update)

    def forward(self, hidden: Tensor, slots: Tensor) -> Tensor:
        kept = torch.where(slots[:, None] >= 0, hidden, torch.zeros_like(hidden))  # else to the null block
        self.kv_cache.view(-1, HIDDEN).index_copy_(0, slots.clamp_min(0), kept)
        return hidden + 1

    @staticmethod
    def update(layer: Layer, first: Tensor, second: Tensor, cache: Tensor, slots: Tensor) -> None:
        cache.view(-1, HIDDEN).index_copy_(0, slots, torch.cat([first.flatten(1), second.flatten(1)], -1))


class Model(nn.Module):
    """Embeddings, the layers, and logits that are the hidden state."""

    def __init__(self, table: Tensor, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.table, self.layers = table, nn.ModuleList(layers)
        self.slots: dict[str, Tensor] = {}
        self.context: dict[str, Any] = {}
        self.given: tuple[int, int] | None = None  # where positions and embeddings lay
        self.requires_raw_input_tokens = False

    def embed_input_ids(
        self, ids: Tensor, multimodal_embeddings: Sequence[Tensor] = (), is_multimodal: Tensor | None = None
    ) -> Tensor:
        found = self.table.index_select(0, ids)
        if is_multimodal is not None:
            found[is_multimodal] = multimodal_embeddings[0]  # as vLLM merges them
        return found

    def forward(self, input_ids: None, positions: Tensor, intermediate_tensors: None, inputs_embeds: Tensor) -> Tensor:
        self.given = positions.data_ptr(), inputs_embeds.data_ptr()
        hidden = inputs_embeds + positions[:, None]
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, self.slots[f"layers.{index}"])
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden


class Executor:
    """vLLM's executor of one rank."""

    def __init__(self, worker: WorkerExtension) -> None:
        self._worker = worker

    def collective_rpc(self, method: str, timeout: float, args: tuple[Any, ...]) -> list[Any]:
        return [getattr(self._worker, method)(*args)]


class Writer:
    """Notes the layers that are written, and of how many chunks."""

    def __init__(self) -> None:
        self.written: list[tuple[int, int]] = []

    def write_layer(self, layer: int, chunks: Sequence[Placement]) -> None:
        self.written.append((layer, len(chunks)))

    def write(self, chunks: Sequence[Placement]) -> None:
        self.written += [(layer, len(chunks)) for layer in range(LAYERS)]


class Source:
    """A chunk whose second layer comes too late."""

    slots = torch.arange(4)

    def stored(self, index: int, deadline: float) -> Placement | None:
        return None if index == 1 else Placement(torch.zeros(1, 4, HIDDEN), None, 3, self.slots)


@pytest.fixture
def device() -> CountingDevice:
    return CountingDevice()


@pytest.fixture
def extension(device: CountingDevice, monkeypatch: pytest.MonkeyPatch) -> WorkerExtension:
    """A worker with this model in the device's memory."""
    whole = [device.add(torch.zeros(4, SIZE, HIDDEN)) for _ in range(LAYERS)]
    layers = [Layer(cache) for cache in whole]
    model = Model(device.add(torch.randn(50, HIDDEN)), layers)
    names = [f"layers.{index}" for index in range(LAYERS)]
    config = SimpleNamespace(
        model_config=SimpleNamespace(dtype=torch.float32, use_mla=False),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context=dict(zip(names, layers, strict=True))),
    )

    def context(metadata: Any, config: Any, num_tokens: int, slot_mapping: dict[str, Tensor], **options: Any) -> Any:
        model.slots, model.context = slot_mapping, options
        return nullcontext()

    def dispatch(tokens: int) -> tuple[CUDAGraphMode, BatchDescriptor]:
        """Graphs of 32 tokens were captured."""
        captured = tokens <= CAPTURED
        mode = CUDAGraphMode.PIECEWISE if captured else CUDAGraphMode.NONE
        return mode, BatchDescriptor(CAPTURED if captured else tokens)

    def build(_: int, common: Any) -> Any:
        told = (common.query_start_loc, common.seq_lens, common.block_table_tensor, common.positions)
        assert all(map(device.holds, told))
        return common

    monkeypatch.setattr(worker_extension, "set_forward_context", context)
    monkeypatch.setattr(worker_extension, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(worker_extension, "get_tensor_model_parallel_world_size", lambda: 1)
    monkeypatch.setattr(WorkerExtension, "_device", torch.device("cpu"))
    worker = WorkerExtension()
    worker.model_runner = SimpleNamespace(
        vllm_config=config,
        model=model,
        get_model=lambda: model,
        supports_mm_inputs=True,
        uses_mrope=False,
        cudagraph_dispatcher=SimpleNamespace(dispatch=dispatch),
        positions=device.add(torch.zeros(64, dtype=torch.int64)),
        inputs_embeds=SimpleNamespace(gpu=device.add(torch.zeros(64, HIDDEN))),
    )
    backend = SimpleNamespace(get_name=lambda: "SOME")
    spec = SimpleNamespace(block_size=SIZE)
    group = SimpleNamespace(layer_names=names, backend=backend, kv_cache_spec=spec)
    vars(worker._attention).update(group=group, builder=SimpleNamespace(build=build))
    worker._attention.segments = [SimpleNamespace(features=HIDDEN // 2, heads=1, width=HIDDEN // 2)] * 2  # type: ignore[list-item]
    worker._kv.pages = Pages.of(torch.arange(SIZE * HIDDEN).view(SIZE, HIDDEN), [HIDDEN // 2] * 2, torch.device("cpu"))
    worker._kv.ring = PinnedRing(device.stream, 1 << 20)
    return worker


def prompt() -> LinkSequence:
    """20 tokens in blocks 2 and 1, five of which carry embeddings."""
    embedded = Embedded(6, torch.full((5, HIDDEN), 7.0), torch.ones(5, dtype=torch.bool))
    return LinkSequence(torch.arange(20).int(), torch.arange(20), [2, 1], (embedded,))


def test_a_forward_waits_for_nothing_and_copies_from_page_locked_memory_alone(
    device: CountingDevice, extension: WorkerExtension
) -> None:
    batch = assemble([(prompt(), [Run(4, 12), Run(15, 20)])], SIZE)
    table = extension.model_runner.model.table.clone()
    with device:
        logits = extension.forward_runs(batch, [0, 1])
    assert (device.pageable, device.waits) == (0, 0)
    assert device.copies > 0
    assert logits is not None
    expected = table[[11, 19]] + torch.tensor([[11.0], [19.0]]) + LAYERS
    assert torch.allclose(logits, expected)


def test_a_forward_of_a_captured_length_replays_its_graph_over_the_runners_buffers(
    device: CountingDevice, extension: WorkerExtension
) -> None:
    runner = extension.model_runner
    batch = assemble([(prompt(), [Run(4, 12), Run(15, 20)])], SIZE)
    padded = batch.padded((64, CAPTURED))
    assert (len(padded.slots), len(padded.index)) == (CAPTURED, 13)
    with device:
        expected = extension.forward_runs(batch, [0, 1])
        assert runner.model.context == {"skip_compiled": True}
        stored = [layer.kv_cache.clone() for layer in runner.model.layers]
        logits = extension.forward_runs(padded, [0, 1])
        assert (device.pageable, device.waits) == (0, 0)
        assert logits is not None
        assert expected is not None
        assert torch.equal(logits, expected)
        assert all(map(torch.equal, stored, [layer.kv_cache for layer in runner.model.layers]))
    assert runner.model.context == {
        "cudagraph_runtime_mode": CUDAGraphMode.PIECEWISE,
        "batch_descriptor": BatchDescriptor(CAPTURED),
    }
    assert runner.model.given == (runner.positions.data_ptr(), runner.inputs_embeds.gpu.data_ptr())


def test_what_hooks_into_layers_is_computed_eagerly(device: CountingDevice, extension: WorkerExtension) -> None:
    extension._kv.writer = Writer()  # type: ignore[assignment]
    batch = assemble([(prompt(), [Run(15, 20)])], SIZE).padded((CAPTURED,))
    with device:
        extension.forward_runs(batch, [0], [Source()], 1.0)  # type: ignore[list-item]
        assert extension.model_runner.model.context == {"skip_compiled": True}
        extension.forward_runs(batch, [0])
        assert extension.model_runner.model.context != {"skip_compiled": True}


def test_rows_in_order_of_length_give_the_same_logits_and_kv(
    device: CountingDevice, extension: WorkerExtension
) -> None:
    other = replace(prompt(), token_ids=torch.arange(30, 50).int(), blocks=[3])
    other.embedded = (Embedded(1, torch.arange(8.0 * HIDDEN).view(8, HIDDEN), torch.ones(8, dtype=torch.bool)),)
    batch = assemble([(prompt(), [Run(0, 9), Run(15, 20)]), (other, [Run(0, 2), Run(4, 11), Run(11, 12)])], SIZE)
    ordered, last = batch.short_first([1, 4])
    assert ordered.rows.lengths.tolist() == [1, 2, 5, 7, 9]
    assert last == [2, 0]
    with device:
        expected = extension.forward_runs(batch, [1, 4])
        stored = [layer.kv_cache.clone() for layer in extension.model_runner.model.layers]
        for layer in extension.model_runner.model.layers:
            layer.kv_cache.zero_()
        logits = extension.forward_runs(ordered, last)
    assert expected is not None
    assert logits is not None
    assert torch.equal(logits, expected)
    assert all(map(torch.equal, stored, [layer.kv_cache for layer in extension.model_runner.model.layers]))
    assert torch.equal(ordered.rows.ends[last], batch.rows.ends[[1, 4]])


def test_a_batch_that_no_bucket_holds_stays_as_it_is() -> None:
    batch = assemble([(prompt(), [Run(0, 20)])], SIZE)
    assert batch.padded(()) is batch.padded((19,)) is batch.padded((20, 64)) is batch
    assert len(batch.padded((64, 21)).token_ids) == 21


def test_stages_are_timed_by_the_device_and_nothing_waits_for_that(
    device: CountingDevice, extension: WorkerExtension
) -> None:
    extension._kv.writer = Writer()  # type: ignore[assignment]
    vars(extension)["_timer"] = DeviceTimer(lambda: StreamEvent(device))
    calls = RankCalls(Executor(extension), 1)
    calls.times_on_device = True
    batch = assemble([(prompt(), [Run(4, 12), Run(15, 20)])], SIZE)
    plan = LinkPlan(LinkRequest("id", [1]), prompt(), [])
    with device:
        _, placed = calls.timed("place", [Placement(torch.zeros(LAYERS, 4, HIDDEN), None, 3, torch.arange(4))])
        _, forward = calls.timed("forward_runs", batch, [0])
        calls.note_times()
    assert device.waits == 0
    assert placed is not None
    assert forward is not None
    assert (placed.seconds, forward.seconds) == (None, None)
    for event, at in zip(device.recorded, (1.0, 4.0, 4.0, 9.0), strict=True):
        event.passed, event.at = True, at
    plan.took("place", 0.5, [placed])
    calls.note_times()
    assert (placed.seconds, forward.seconds) == (0.003, 0.005)
    assert plan.end_stages() == {"place": pytest.approx(503.0)}
    assert plan.end_stages() == {"place": pytest.approx(503.0)}
    assert device.waits == 0
    assert extension.take_times() == {}


def test_a_call_that_fails_has_no_time(device: CountingDevice, extension: WorkerExtension) -> None:
    vars(extension)["_timer"] = DeviceTimer(lambda: StreamEvent(device))
    calls = RankCalls(Executor(extension), 1)
    calls.times_on_device = True
    with pytest.raises(AssertionError):
        calls.timed("place", [])  # without a writer
    for event in device.recorded:
        event.passed = True
    calls.note_times()
    assert extension.take_times() == {}


def test_layers_that_come_in_are_written_as_the_forward_reaches_them(
    device: CountingDevice, extension: WorkerExtension
) -> None:
    writer = extension._kv.writer = Writer()  # type: ignore[assignment]
    batch = assemble([(prompt(), [Run(15, 20)])], SIZE)
    with device:
        extension.forward_runs(batch, [0], [Source(), Source()], 1.0)  # type: ignore[list-item]
    assert writer.written == [(0, 2), (1, 0), (2, 2)]
    assert (device.pageable, device.waits) == (0, 0)


def test_blocks_are_copied_and_turned_on_the_device_alone(
    device: CountingDevice, extension: WorkerExtension, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout.gqa(LAYERS, 1, HIDDEN // 2, RotaryScheme.from_base(HIDDEN // 2))
    extension._kv.layer_layout = layout.of_one_layer
    kv, empty = torch.randn(LAYERS, 20, HIDDEN), torch.empty

    def on_device(*shape: Any, **options: Any) -> Tensor:
        made = empty(*shape, **options)
        return device.add(made) if len(shape) == 3 else made

    with device:
        extension.write_kv(kv, torch.arange(32, 52))
        monkeypatch.setattr(torch, "empty", on_device)
        extension.copy_kv([2, 3], [1, 0], 20, 7)
    monkeypatch.undo()
    assert (device.pageable, device.waits) == (0, 0)
    caches = torch.stack([layer.kv_cache for layer in extension.model_runner.model.layers])
    found = torch.cat([caches[:, 1], caches[:, 0, :4]], dim=1)
    assert torch.allclose(found, relocate(kv, 7, layout), atol=1e-6)


def test_what_was_written_is_read_through_page_locked_memory(
    device: CountingDevice, extension: WorkerExtension, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = torch.randn(LAYERS, 6, HIDDEN)
    empty = torch.empty

    def on_device(*shape: Any, device: torch.device | None = None, **options: Any) -> Tensor:
        made = empty(*shape, **options)
        return made if device is None else counting.add(made)

    counting = device
    with device:
        extension.write_kv(kv, torch.arange(33, 39))
        monkeypatch.setattr(torch, "empty", on_device)
        found = extension.read_kv([2, 1], 1, 6)
    assert torch.equal(found, kv)
    assert device.pageable == 0
