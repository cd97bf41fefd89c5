"""Reading tokens out of a block, however it keeps them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from prefill_workers.engine.pages import Grid, Pages, learnt

SIZE, WIDTHS = 16, (12, 4)  # two segments


def plain() -> Tensor:
    return torch.arange(SIZE * sum(WIDTHS)).view(SIZE, -1)


def paired() -> Tensor:
    """Keys in pairs of features and values in pairs of tokens, as the CPU's matrix instructions want them."""
    keys = torch.arange(SIZE * 12).view(6, SIZE, 2).permute(1, 0, 2).reshape(SIZE, 12)
    values = torch.arange(SIZE * 4).view(SIZE // 2, 4, 2).permute(0, 2, 1).reshape(SIZE, 4)
    return torch.cat([keys, SIZE * 12 + values], 1)


def shuffled() -> Tensor:
    """Nothing but a permutation, of the first segment; the second is regular."""
    elements = plain()
    mixed = elements[:, :12].flatten()[torch.randperm(SIZE * 12, generator=torch.Generator().manual_seed(0))]
    return torch.cat([mixed.view(SIZE, 12), elements[:, 12:]], 1)


@pytest.mark.parametrize(("elements", "regular"), [(plain(), 2), (paired(), 2), (shuffled(), 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_what_is_read_is_what_every_element_says(elements: Tensor, regular: int, dtype: torch.dtype):
    pages = Pages.of(elements, WIDTHS, torch.device("cpu"))
    assert sum(part.elements is None for part in pages.parts) == regular
    blocks = torch.randint(0, 200, (3, elements.numel()), generator=torch.Generator().manual_seed(1)).to(dtype)
    out = torch.empty(3, *elements.shape, dtype=dtype)
    pages.read(blocks, out)
    assert torch.equal(out, blocks[:, elements.flatten()].view_as(out))


@pytest.mark.parametrize("elements", [plain(), paired(), shuffled()])
@pytest.mark.parametrize("whole", [8, 128])
def test_where_a_block_keeps_its_tokens_is_learnt_from_what_it_gives_back(elements: Tensor, whole: int):
    def through(numbers: Tensor) -> Tensor:
        assert numbers.max() < whole
        return torch.zeros(elements.numel(), dtype=torch.long).scatter(0, elements.flatten(), numbers.flatten())

    found = learnt(*elements.shape, whole, through)
    assert found is not None
    assert torch.equal(found, elements)
    assert learnt(*elements.shape, whole, lambda numbers: through(numbers // 2)) is None


@given(st.lists(st.tuples(st.integers(2, 4), st.integers(1, 50)), max_size=4))
def test_a_grid_is_found_again(digits: list[tuple[int, int]]):
    numbers = Grid(tuple(size for size, _ in digits), tuple(stride for _, stride in digits)).numbers()
    assert torch.equal(Grid.like(numbers + 7).numbers(), numbers)
