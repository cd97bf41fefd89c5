"""Make `import torchvision` work beside a CPU build of torch; no-op where it works already.

The torchvision wheel that pip finds is a CUDA build. Beside a CPU torch its compiled library does not load, so the
operators `torchvision::nms` and `torchvision::qnms` are never defined, and `torchvision._meta_registrations`, which
registers fake kernels for them, fails the whole import. Image processors only use torchvision's tensor transforms,
which are pure Python: declaring the two operators is enough.

torchvision loads its library before it imports `_meta_registrations` (its `__init__` insists on that order), so at that
moment it is known whether the operators exist. A `.pth` file beside this module in site-packages imports it at
interpreter start, because it has to be there in every process that may import torchvision: Ray's workers and vLLM's
model-inspection subprocess included. That costs one list insertion. Wheels have both files (`setup.py`); for an
editable install `infra/bootstrap.sh` copies them.
"""

import sys


class _DeclareMissingOperators:
    """Import hook (`sys.meta_path`) that acts just before `torchvision._meta_registrations`."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name != "torchvision._meta_registrations":
            return
        sys.meta_path.remove(self)
        import torch

        if not hasattr(torch.ops.torchvision, "nms"):
            self.library = torch.library.Library("torchvision", "FRAGMENT")
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


_finder = _DeclareMissingOperators()  # keeps the library object: the operators live as long as it does
sys.meta_path.insert(0, _finder)
