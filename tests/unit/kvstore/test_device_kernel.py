"""The operator on a device: Triton's interpreter runs the kernel, and its compiler takes it, without a GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from kvstore.operator.device_kernel import constants, may_store
from kvstore.operator.layout import Layout
from kvstore.operator.page_table import PageTable
from kvstore.operator.rotary import RotaryScheme
from tests.triton_interpreter import run_interpreted


def test_where_triton_has_no_such_fp8_the_host_places():
    assert [may_store(torch.float8_e4m3fn, at) for at in ((8, 0), (8, 6), (8, 9), (9, 0))] == [False, False, True, True]
    assert all(may_store(dtype, (8, 0)) for dtype in (torch.float8_e5m2, torch.bfloat16))


def test_the_kernel_equals_the_operator_in_tritons_interpreter() -> None:
    run_interpreted(Path(__file__).with_name("triton_interpreted.py"))


@pytest.mark.parametrize(
    ("capability", "dtype", "paged"),
    [(90, torch.bfloat16, torch.bfloat16), (89, torch.bfloat16, torch.float8_e4m3fn)],
)
def test_the_kernel_compiles_for_gpus(
    capability: int,
    dtype: torch.dtype,
    paged: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It loads and stores 16 bytes at a time, multiplies on tensor cores, and has registers enough."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kvstore.operator.device_loops import place_chunks

    layout = Layout.gqa(28, 4, 128, RotaryScheme.from_base(128))
    cache = torch.zeros(2, 4, 16, 256, dtype=paged)
    token = torch.arange(16)[:, None]
    segment, head, column = torch.cartesian_prod(*map(torch.arange, (2, 4, 128))).unbind(1)
    elements = (head * 16 + token) * 256 + segment * 128 + column
    pages = PageTable.of([cache] * 28, elements, layout)
    assert pages is not None
    assert pages.is_aligned
    kernel: Any = place_chunks
    fixed = constants(pages, layout, dtype, is_aligned=True)
    warps = fixed.pop("num_warps")
    pointers = {"words": "*i64", "angles": "*fp32", "pages": "*i64", "columns": "*i64"}
    signature = {name: pointers.get(name, "constexpr" if name in fixed else "i32") for name in kernel.arg_names}
    index = {name: (number,) for number, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={index[name]: value for name, value in fixed.items()},
        attrs={index[name]: [["tt.divisibility", 16]] for name in (*pointers, "block_stride", "token_stride")},
    )
    built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})
    code = built.asm["ptx"]
    assert re.search(r"ld\.global[\w.:]*\.v4", code)
    assert re.search(r"st\.global[\w.:]*\.v[24]", code)
    assert "mma" in code
    assert " STACK:0 " in _resources(built.asm["cubin"], tmp_path), "registers spill"


def _resources(cubin: bytes, folder: Path) -> str:
    """Report of `cuobjdump` on a program's registers and stack."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    (folder / "kernel.cubin").write_bytes(cubin)
    return subprocess.run(
        [tool, "--dump-resource-usage", folder / "kernel.cubin"], check=True, capture_output=True, text=True
    ).stdout
