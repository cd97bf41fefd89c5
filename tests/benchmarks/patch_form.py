"""Forming a patch: milliseconds by method, and loss against a full SVD.

The deficits are synthetic, with a spectrum as measured on real models: 120 directions of each layer hold 90 % of the
energy (kamera.md §4). A loss is the share of the energy that the SVD's directions keep and the method's do not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from rich.console import Console
from torch import Tensor

from kvstore.operator.svd import gram_directions, krylov_directions
from serving.bench.harness import Arm, Benchmark, Outcome, clock_ms, in_turns

_COMPONENTS, _SHARE = 120, 0.9


class Case(NamedTuple):
    """Size of one segment's deficit, keys or values, and the rank that is kept of it."""

    layers: int
    tokens: int
    features: int
    rank: int

    def __str__(self) -> str:
        return f"{self.layers}x{self.tokens}x{self.features} rank {self.rank}"


CASES = [  # GQA at two ranks; an MLA latent of a short chunk; MHA, wider than the chunk is long
    Case(28, 1024, 512, 32),
    Case(28, 1024, 512, 64),
    Case(27, 256, 512, 32),
    Case(32, 576, 4096, 32),
]
QUICK = [Case(4, 1024, 512, 32), Case(4, 576, 2048, 32)]
_DESCRIPTIONS = {
    "svd": "torch.linalg.svd, thin",
    "gram": "all eigenvectors of the Gram matrix",
    "krylov": "randomized: block Krylov space of the Gram matrix",
    "project": "coefficients on a shared basis, no decomposition",
}


def run(quick: bool, console: Console) -> Outcome:
    """Measure every method on every case."""
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in _DESCRIPTIONS}
    losses: dict[str, dict[str, float]] = {"gram": {}, "krylov": {}}
    cases = QUICK if quick else CASES
    for case in cases:
        console.print(f"  {case}", highlight=False)
        delta = _deficit(case)
        # Directions live on the shorter side (`kvstore.operator.svd.factor`).
        tall = delta if case.tokens >= case.features else delta.mT.contiguous()
        best = _svd_directions(tall, case.rank)
        methods: dict[str, Callable[[Tensor, int], Tensor]] = {
            "svd": _svd_directions,
            "gram": gram_directions,
            "krylov": krylov_directions,
            "project": partial(_given, best),
        }
        work = {name: partial(_coefficients, method, tall, case.rank) for name, method in methods.items()}
        kept = _energy(work["svd"]())
        for name, by_case in losses.items():
            by_case[str(case)] = 1 - _energy(work[name]()) / kept
        arms = {name: partial(clock_ms, body) for name, body in work.items()}
        for name, times in in_turns(arms, 2 if quick else 5).items():
            samples[name][str(case)] = times
    arms_ = {name: Arm(name, text, samples[name]) for name, text in _DESCRIPTIONS.items()}
    first = str(cases[0])
    figures = {f"speedup_{name}": arms_["svd"].median_ms(first) / arms_[name].median_ms(first) for name in samples}
    figures |= {f"loss_{name}": max(0.0, *by_case.values()) for name, by_case in losses.items()}
    del figures["speedup_svd"]
    workload = {"cases": [case._asdict() for case in cases], "threads": torch.get_num_threads(), "dtype": "float32"}
    return Outcome(workload, list(arms_.values()), figures, {"energy lost": losses})


def _deficit(case: Case) -> Tensor:
    """Random [layers, tokens, features] with singular values in a power law of realistic energy."""
    count = min(case.tokens, case.features)
    index = torch.arange(1, count + 1, dtype=torch.float64)
    low, high = 0.0, 6.0
    for _ in range(50):  # the exponent: the more it is, the fewer components hold the share
        middle = (low + high) / 2
        energy = index**-middle
        enough = float(energy[:_COMPONENTS].sum() / energy.sum()) >= _SHARE
        low, high = (low, middle) if enough else (middle, high)
    generator = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(case.tokens, count, generator=generator)).Q
    right = torch.linalg.qr(torch.randn(case.layers, case.features, count, generator=generator)).Q
    return (left * (index**-high).sqrt().float()) @ right.mT


def _svd_directions(tall: Tensor, rank: int) -> Tensor:
    return torch.linalg.svd(tall, full_matrices=False).Vh[:, :rank].mT


def _given(directions: Tensor, tall: Tensor, rank: int) -> Tensor:
    return directions


def _coefficients(method: Callable[[Tensor, int], Tensor], tall: Tensor, rank: int) -> Tensor:
    return tall @ method(tall, rank)


def _energy(coefficients: Tensor) -> float:
    return float(coefficients.double().square().sum())


BENCHMARK = Benchmark(
    "patch-form",
    "Forming a patch by SVD, Gram matrix, block Krylov and projection: milliseconds, and the energy each loses.",
    run,
    {"loss_krylov": ("<=", 1e-5)},
)
