"""Checkpoints for tests and benchmarks: random weights in the shape of real families.

`python -m infra.checkpoints NAME|all [--out DIR]` writes them; `checkpoint_path(NAME)` builds on demand. Building takes
seconds, needs no network, and the same recipe gives the same bytes. `weights` says what the numbers aim at.
"""

from __future__ import annotations

import shutil
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from infra.checkpoints.kimi_vl import KimiVL
from infra.checkpoints.llava import Llava
from infra.checkpoints.qwen2_5_vl import Qwen25VL
from infra.checkpoints.qwen3_vl import Qwen3VL
from infra.checkpoints.text import DeepSeekV2, Qwen2
from infra.locking import only_writer

DEFAULT_OUT = Path(".orbitserve/checkpoints")
STAMP = "recipe.sha256"


class Recipe(Protocol):
    """Sizes of a model, and how to write one."""

    @property
    def vocabulary(self) -> int:
        """Token ids in all."""

    def write(self, folder: Path) -> None:
        """Write a checkpoint into the existing `folder`."""


_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}

RECIPES: dict[str, Recipe] = {
    "qwen2_5_vl-tiny": Qwen25VL(
        vocabulary=512, hidden=256, intermediate=512, layers=4, heads=8, kv_heads=2, head_size=32,
        mrope_section=(4, 6, 6), vision_depth=2, vision_hidden=128,
    ),
    # 250M parameters: long prefills cost enough on a CPU for time to first token to mean something.
    "qwen2_5_vl-250m": Qwen25VL(
        vocabulary=8192, hidden=1024, intermediate=3840, layers=16, heads=8, kv_heads=2, head_size=128,
        mrope_section=(16, 24, 24), vision_depth=4, vision_hidden=256,
    ),
    # The size that is served on a GPU, but for its vocabulary, and without weights: their values cost no time.
    "qwen2_5_vl-7b": Qwen25VL(
        vocabulary=8192, hidden=3584, intermediate=18944, layers=28, heads=28, kv_heads=4, head_size=128,
        rope_theta=1e6, mrope_section=(16, 24, 24), vision_depth=32, vision_hidden=1280, drawn=False,
        vision={"num_heads": 16, "intermediate_size": 3420, "fullatt_block_indexes": [7, 15, 23, 31]},
    ),
    "qwen3_vl-tiny": Qwen3VL(),
    "kimi_vl-tiny": KimiVL(),
    "llava-tiny": Llava(),
    "qwen2-tiny": Qwen2(),
    "qwen2-yarn-tiny": Qwen2(rope_scaling=_YARN),
    "qwen2-linear-tiny": Qwen2(rope_scaling={"rope_type": "linear", "factor": 2.0}),
    "deepseek_v2-tiny": DeepSeekV2(),
    "deepseek_v2-yarn-tiny": DeepSeekV2(rope_scaling={**_YARN, "mscale": 0.7, "mscale_all_dim": 0.7}),
}  # fmt: skip


def checkpoint_path(name: str, out: Path = DEFAULT_OUT) -> Path:
    """Folder of the checkpoint `name` under `out`, built first unless a current one is there.

    Raises:
        KeyError: there is no recipe of that name.
    """
    recipe = RECIPES[name]
    target = out / name
    stamp = _stamp(recipe)
    if _is_current(target, stamp):
        return target
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    out.mkdir(parents=True, exist_ok=True)
    with only_writer(out):
        if not _is_current(target, stamp):  # else another process has built it meanwhile
            building = out / f"{name}.building"
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            recipe.write(building)
            (building / STAMP).write_text(stamp)
            shutil.rmtree(target, ignore_errors=True)
            building.rename(target)  # an interrupted build never looks like a finished one
    return target


def _is_current(target: Path, stamp: str) -> bool:
    return (target / STAMP).is_file() and (target / STAMP).read_text() == stamp


def _stamp(recipe: Recipe) -> str:
    """Identity of what would be written: the recipe and everything in this folder."""
    sources = (path.read_text() for path in sorted(Path(__file__).parent.iterdir()) if path.is_file())
    return sha256("\0".join((repr(recipe), *sources)).encode()).hexdigest()
