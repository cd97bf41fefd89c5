"""Patches tried on one page of an otherwise exact prompt (kamera.md §5 and App. D)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvstore.operator.apply import apply
from kvstore.operator.patch import Patch, deficit
from serving.bench.fidelity.reader import Page, Prompt, Read, Reader
from serving.bench.fidelity.scores import Scores


@dataclass(frozen=True, eq=False)
class Behind:
    """The last page of a prompt behind others: prompt, exact prefill, deficit."""

    prompt: Prompt
    exact: Read
    canonical: Tensor

    @property
    def delta(self) -> Tensor:
        """Δ of the last page [layers, tokens, features], fp32."""
        return deficit(self.exact.pages[-1], self.canonical)


class Probe:
    """Tries patches on the last pages of prompts."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def canonical(self, pages: Sequence[Page]) -> list[Tensor]:
        """KV(B|∅) of each page."""
        prompts = [self.reader.prompt([page], "?", "red") for page in pages]
        return self.reader.alone([prompt.places[0] for prompt in prompts])

    def behind(self, prompts: Sequence[Prompt], canonical: Sequence[Tensor]) -> list[Behind]:
        """Exact prefill and deficit of each prompt's last page, whose canonical KV is given."""
        reads = self.reader.exact(prompts)
        return [Behind(*parts) for parts in zip(prompts, reads, canonical, strict=True)]

    def score(
        self,
        scores: Mapping[str, Scores],
        cases: Sequence[Behind],
        patches: Mapping[str, list[Patch | None]],
        nbytes: Callable[[str, Patch], int] = lambda arm, patch: patch.nbytes,
    ) -> None:
        """Score every case with each arm's patch of its last page; None is blind reuse.

        `nbytes`: what an arm's patch would take where it is stored.
        """
        layout = self.reader.engine.layout
        for case in cases:
            scores["exact"].add(case.exact.answers, case.exact.answers, case.prompt.answer, computed=1.0)
        tried = [
            (name, case, patch) for name, formed in patches.items() for case, patch in zip(cases, formed, strict=True)
        ]
        linked = [[*case.exact.pages[:-1], apply(case.canonical, patch, 0, layout)] for _, case, patch in tried]
        reads = self.reader.over([case.prompt for _, case, _ in tried], linked)
        for (name, case, patch), read in zip(tried, reads, strict=True):
            kept = 0.0 if patch is None else nbytes(name, patch) / case.canonical.nbytes
            scores[name].add(read.answers, case.exact.answers, case.prompt.answer, kept)
