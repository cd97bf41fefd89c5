"""Service curves: the time that work takes on a replica.

Pure values, without torch and without Ray.

| curve       | used by                                                                                        |
|-------------|------------------------------------------------------------------------------------------------|
| ForwardCost | the prefill scheduler, which learns it; routing, from reports; placement and compilation plans |
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ForwardCost:
    """Seconds of one forward: a fixed part, and so much per token.

    The fixed part is what reading the weights and starting the kernels takes. Counted in tokens it is some 20 with 250M
    parameters on two cores, a hundred where these multiply matrices in hardware (AMX), and hundreds on GPUs.

    Attributes:
        fixed_tokens: the fixed part, in tokens.
        seconds_per_token: None: not measured yet; all times are 0 then.
    """

    fixed_tokens: float
    seconds_per_token: float | None = None

    def seconds(self, tokens: float) -> float:
        """Seconds of a forward over so many tokens."""
        return self.added_seconds(tokens + self.fixed_tokens)

    def added_seconds(self, tokens: float) -> float:
        """Seconds that further tokens add to a forward that runs anyway."""
        return tokens * (self.seconds_per_token or 0.0)

    def joins(self, tokens: int, others: int, behind: int) -> bool:
        """True if a link with so many tokens to compute should join the forward of `others` links.

        It delays those by what its tokens take; with a forward of its own it would delay itself, and the `behind` that
        come after it, by the fixed part.
        """
        return others * tokens <= (1 + behind) * self.fixed_tokens

    def forwards(self, links: float, tokens: float) -> float:
        """Forwards that waiting links will take, with so many tokens in all and about as many each.

        Those that compute little join others' (`joins`): of n links of t tokens each, one and those k join that have
        k·t <= (n - k)·fixed. So a forward takes n·s + 1/2 of those that are left, give or take a half, with
        s = fixed / (t + fixed); the last 1 / 2s take one each.
        """
        if not tokens or links <= 1:
            return min(links, 1.0)
        joining = self.fixed_tokens * links / tokens  # fixed / t
        alone = (1 + joining) / (2 * joining) if joining else math.inf
        if links <= alone:
            return links
        shared = math.log((links / alone + 1) / 2) / math.log1p(joining)
        return max(1.0, min(links, alone + shared))

    def queued_tokens(self, links: float, tokens: float) -> float:
        """Tokens of waiting links, the fixed parts of their forwards included."""
        return tokens + self.fixed_tokens * self.forwards(links, tokens)


USUAL = ForwardCost(fixed_tokens=16.0, seconds_per_token=8e-4)  # of a replica that has measured nothing yet
