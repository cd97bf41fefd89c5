"""An engine's self-check: it computes as vLLM does, and all ways of writing KV agree.

In fp32 agreement is held to 1e-4 in log-probability and 1e-4 in relocated KV of all layers. In fewer bits the
log-probability is held to what one more or one fewer split of a matrix product may change, and relocation to rounding
in the first layer: behind an attention, KV that was rounded elsewhere differs by more than that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kvstore.operator.apply import relocate
from kvstore.operator.device_kernel import Placement
from prefill_workers.engine.batch import assemble
from prefill_workers.engine.engine import PrefillEngine
from prefill_workers.engine.spec import EngineSpec
from prefill_workers.sequence import LinkSequence, Run

_SHIFT = 41  # positions that KV is relocated by


class CheckOutcome(NamedTuple):
    """One check: its name, whether it passed, and what was measured."""

    name: str
    passed: bool
    detail: str


class SelfCheckError(RuntimeError):
    """The engine does not compute what it must; it refuses to serve."""


def self_check(engine: PrefillEngine) -> list[CheckOutcome]:
    """Run all checks that an engine is able to; before it serves."""
    return [*_SelfCheck(engine).outcomes()]


def require_self_check(engine: PrefillEngine) -> list[CheckOutcome]:
    """`self_check`, refusing to go on when anything failed.

    Raises:
        SelfCheckError: naming every failed check.
    """
    outcomes = self_check(engine)
    failed = [f"{o.name}: {o.detail}" for o in outcomes if not o.passed]
    if failed:
        raise SelfCheckError(f"engine self-check failed for {engine.spec.model}: " + "; ".join(failed))
    return outcomes


def check_alone(spec: EngineSpec) -> list[CheckOutcome]:
    """Build an engine, check it and tear it down."""
    engine = PrefillEngine(spec)
    try:
        return self_check(engine)
    finally:
        engine.shutdown()


class _Known(NamedTuple):
    """KV [layers, tokens, features] that comes in layer by layer at once."""

    slots: Tensor
    kv: Tensor

    def layer(self, index: int, deadline: float) -> Tensor:
        return self.kv[index]

    def stored(self, index: int, deadline: float) -> Placement:
        return Placement(self.kv[index : index + 1], None, 0, self.slots)


class _SelfCheck:
    """Checks of one engine over the same random prompt, and what one hands to the next."""

    def __init__(self, engine: PrefillEngine) -> None:
        self._engine = engine
        self._exact = engine.dtype == torch.float32
        self._log_probability = 1e-4 if self._exact else 0.15  # allowed
        self._kv = 1e-4 if self._exact else 0.02  # allowed, relative, of the first layers
        vocabulary = min(engine.config.model_config.get_vocab_size(), 256)
        self._n = n = min(3 * engine.block_size + 5, engine.max_model_len - 2)
        self._tokens = torch.randint(0, vocabulary, (n,), generator=torch.Generator().manual_seed(7))
        self._reference = engine.vllm_logprobs(self._tokens.tolist(), 5)
        count = 1 + n // engine.block_size
        self._blocks = list(range(1, 1 + count))
        self._spare = list(range(engine.num_blocks - count, engine.num_blocks))
        self._split = [Run(a, b) for a, b in pairwise([0, n // 3, n // 2, n])]
        self._inner = 3, n - 5  # first token and count of KV that begins and ends inside a block

    def outcomes(self) -> Iterator[CheckOutcome]:
        """Each check's outcome, in an order in which KV that one leaves serves the next."""
        engine = self._engine
        yield self._forward("forward equals vLLM's prefill", [Run(0, self._n)])
        yield self._forward("split runs equal one run", self._split)
        yield self._round_trip()
        if engine.places_on_device:
            yield self._placement()
        yield self._partial_forward()
        if engine.tells_attention and engine.layout.layers > 1:
            yield self._attention()
        if engine.accepts_layerwise_kv:
            yield self._layerwise()
        yield self._relocation()

    def _forward(self, name: str, runs: list[Run]) -> CheckOutcome:
        return self._next_token(name, self._engine.logits([(self._sequence(self._blocks), runs)]))

    def _round_trip(self) -> CheckOutcome:
        self._engine.write_kv(self._stored(), self._spare_slots())
        same = torch.equal(self._engine.read_kv(self._spare, 1, self._inner[1]), self._stored())
        return CheckOutcome("KV written equals KV read", same, "bit for bit" if same else "they differ")

    def _placement(self) -> CheckOutcome:
        engine, stored = self._engine, self._stored()
        engine.place([Placement(stored, None, _SHIFT, self._spare_slots())])
        off = _off(engine.read_kv(self._spare, 1, stored.shape[1]), relocate(stored, _SHIFT, engine.layout))
        engine.write_kv(stored, self._spare_slots())
        allowed = 1e-6 if self._exact else torch.finfo(engine.dtype).eps + engine.quantum
        return _within("KV placed by the kernel equals the operator", off, allowed)

    def _partial_forward(self) -> CheckOutcome:
        engine, stored = self._engine, self._stored()
        ran = min(2, engine.layout.layers)
        engine.forward_first([(self._sequence(self._spare), self._split)], ran)
        whole, partial = (engine.read_kv(blocks, 0, self._n) for blocks in (self._blocks, self._spare))
        off = _off(partial[:ran], whole[:ran])
        ended = torch.equal(partial[ran:, 1 : 1 + stored.shape[1]], stored[ran:])
        behind = "were left alone" if ended else "ran too"
        return CheckOutcome(
            "a partial forward equals a forward's first layers",
            off <= self._kv and ended,
            f"KV off by {off:.2g}; the layers behind {behind}",
        )

    def _attention(self) -> CheckOutcome:
        batch = assemble([(self._sequence(self._spare), [Run(0, self._n)])], self._engine.block_size)
        off = self._engine.first_attention_gap(batch)
        return _within("attention told equals the first layer's attention", off, self._kv)

    def _layerwise(self) -> CheckOutcome:
        engine, half = self._engine, self._n // 2
        known = _Known(engine.slots(self._spare, 0, half), engine.read_kv(self._blocks, 0, half))
        logits = engine.logits([(self._sequence(self._spare), [Run(half, self._n)])], [known])
        return self._next_token("KV written by layer equals KV written before", logits)

    def _relocation(self) -> CheckOutcome:
        engine = self._engine
        engine.forward([(self._sequence(self._spare, _SHIFT), [Run(0, self._n)])])
        layers = slice(None) if self._exact else slice(1)
        computed = engine.read_kv(self._spare, *self._inner)[layers]
        off = _off(relocate(self._stored(), _SHIFT, engine.layout)[layers], computed)
        allowed = 1e-4 if self._exact else self._rounding_of_relocated_keys()
        return _within("relocated KV equals computed KV", off, allowed)

    def _rounding_of_relocated_keys(self) -> float:
        """Relative distance that rounding allows between relocated and computed keys.

        With u half a unit in the last place: the engine's table of angles is rounded (u times a pair's length, so
        sqrt(2) u) and so is its key (u), together e. Relocating turns a pair that is e off (sqrt(2) e) and rounds (u);
        the key it is compared with is e off as well. Quantising adds its own u to both, the first of them turned.
        """
        u, root = torch.finfo(self._engine.dtype).eps / 2, math.sqrt(2)
        e = (1 + root) * u
        return root * e + u + e + (root + 1) * self._engine.quantum / 2

    def _sequence(self, blocks: list[int], first: int = 0) -> LinkSequence:
        """The prompt in these blocks, as text whose positions begin with `first`."""
        index = torch.arange(first, first + self._n)
        positions = index.expand(3, -1) if self._engine.uses_mrope else index
        return LinkSequence(self._tokens.int(), positions, blocks)

    def _stored(self) -> Tensor:
        """KV that the forwards at the start have left."""
        return self._engine.read_kv(self._blocks, *self._inner)

    def _spare_slots(self) -> Tensor:
        """Slots for it in other blocks, at another place inside these."""
        return self._engine.slots(self._spare, 1, 1 + self._inner[1])

    def _next_token(self, name: str, logits: Tensor) -> CheckOutcome:
        """Whether the last row of logits tells the next token as vLLM does."""
        logprobs = logits[-1].log_softmax(-1)
        off = max(abs(float(logprobs[token]) - expected) for token, expected in self._reference.items())
        return CheckOutcome(name, off <= self._log_probability, f"log-probability off by {off:.2g}")


def _off(found: Tensor, expected: Tensor) -> float:
    """Largest distance, relative to what is expected at most."""
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


def _within(name: str, off: float, allowed: float) -> CheckOutcome:
    return CheckOutcome(name, off <= allowed, f"off by {off:.2g}")
