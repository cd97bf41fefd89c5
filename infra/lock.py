"""Writer of the lock files for the Python it runs on: `python -m infra.lock` (`make lock`).

| lock        | what is in it                            | where it comes from                                         |
|-------------|------------------------------------------|-------------------------------------------------------------|
| `cpu-py3XX` | what serving on CPUs needs               | what is installed here, so: what passed the tests           |
| `dev-py3XX` | what tests, types and style need besides | the same                                                    |
| `gpu-py3XX` | what serving on NVIDIA GPUs needs        | pip's resolver, with direct requirements as in the CPU lock |

Each pin has the SHA-256 of the archive that pip chooses for it on this platform. To move a version: install it into
`.venv`, run the tests, `make lock`. For another version of Python, make an environment with the packages of a lock that
there is, test, and run this in it.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCKS = Path(__file__).with_name("locks")
PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"
# vLLM wants both and nothing here uses them; where they are CUDA builds, they break transformers beside a CPU torch.
EXCLUDED = ("torchaudio", "torchcodec")


def lock_file(kind: str) -> Path:
    """The lock of `kind` ("cpu", "gpu" or "dev") for this version of Python."""
    return LOCKS / f"{kind}-py{sys.version_info.major}{sys.version_info.minor}.lock"


def requirements(*extras: str) -> list[str]:
    """The project's direct requirements, with those of `extras`, as `pyproject.toml` names them."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    return [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]


def installed(roots: Iterable[str]) -> dict[str, str]:
    """Installed versions, `name==version` by canonical name, of all that `roots` need.

    Raises:
        importlib.metadata.PackageNotFoundError: a package is needed, and neither installed nor of `EXCLUDED`.
    """
    pins: dict[str, str] = {}
    queue, met = [Requirement(root) for root in roots], set()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if name in EXCLUDED or (name, *sorted(requirement.extras)) in met:
            continue
        met.add((name, *sorted(requirement.extras)))
        distribution = metadata.distribution(name)
        pins[name] = f"{distribution.name}=={distribution.version}"
        extras = requirement.extras or {""}
        queue += [
            needed
            for needed in map(Requirement, distribution.requires or ())
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras)
        ]
    return pins


def archive_hashes(pins: Sequence[str]) -> dict[str, str]:
    """Per pin, the SHA-256 (hex) of the archive that pip would install.

    Downloads metadata, installs nothing.
    """
    local = [pin for pin in pins if "+" in pin]  # CPU builds, which lie in an index of their own
    index = ["--extra-index-url", cpu_index()]
    rest = _resolved([pin for pin in pins if pin not in local], ["--no-deps"])
    return rest | (_resolved(local, ["--no-deps", *index]) if local else {})


def gpu_hashes(pins: dict[str, str]) -> dict[str, str]:
    """SHA-256 per pin of the GPU set: its direct requirements and what they need.

    Direct requirements, and torch, have the versions that they have in `pins`; vLLM's two builds differ in others.
    """
    same = {canonicalize_name(Requirement(line).name) for line in requirements("gpu")} & pins.keys() | {"torch"}
    # Three equals signs: a CPU build does not do for a version without a local part.
    held = [re.sub(r"==([^+]+).*", r"===\1", pins[name]) for name in sorted(same)]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(held))
        constraints.flush()
        return _resolved(requirements("gpu"), ["--constraint", constraints.name])


def cpu_index() -> str:
    """The index of CPU builds that `bootstrap.sh` falls back to."""
    found = re.search(r"CPU_TORCH_INDEX=(\S+)", Path(__file__).with_name("bootstrap.sh").read_text())
    assert found is not None
    return found[1]


def _resolved(wanted: Sequence[str], options: Sequence[str]) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        report, listed = Path(folder, "report.json"), Path(folder, "wanted.txt")
        listed.write_text("\n".join(wanted))
        dry_run = ["install", "-qq", "--dry-run", "--ignore-installed"]
        subprocess.run(
            [sys.executable, "-m", "pip", *dry_run, *options, "--report", str(report), "-r", str(listed)],
            check=True,
        )
        chosen = json.loads(report.read_text())["install"]
    hashes = {}
    for item in chosen:
        package = item["metadata"]
        hashes[f"{package['name']}=={package['version']}"] = item["download_info"]["archive_info"]["hashes"]["sha256"]
    return hashes


def render(title: str, hashes: dict[str, str]) -> str:
    """A lock's text: one pin with its hash per entry, sorted.

    Nothing in it says where archives were found.
    """
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    header = [
        f"# {title} for {platform.system()} {platform.machine()}, Python {python}.",
        "# Written by `make lock`; installed with --require-hashes --no-deps.",
    ]
    entries = [
        f"{pin} \\\n    --hash=sha256:{value}"
        for pin, value in sorted(hashes.items(), key=lambda item: item[0].lower())
    ]
    return "\n".join([*header, *entries, ""])


def main() -> None:
    """Lock this environment, and the GPU set that goes with it.

    Raises:
        SystemExit: pip resolved a pin to something else than what is installed.
    """
    serving = installed(requirements("cpu"))
    tools = {name: pin for name, pin in installed(requirements("dev")).items() if name not in serving}
    _write("cpu", "CPU set", _checked(serving.values()))
    _write("dev", "Tools of tests, types and style", _checked(tools.values()))
    _write("gpu", "NVIDIA GPU set, not yet tried on a machine with a GPU,", gpu_hashes(serving))


def _checked(pins: Iterable[str]) -> dict[str, str]:
    wanted = list(pins)
    hashes = archive_hashes(wanted)
    if len(hashes) != len(wanted):
        raise SystemExit(f"pip resolved {len(hashes)} of {len(wanted)} installed packages")
    return hashes


def _write(kind: str, title: str, hashes: dict[str, str]) -> None:
    lock_file(kind).write_text(render(title, hashes))
    print(f"{len(hashes)} packages locked in {lock_file(kind)}")


if __name__ == "__main__":
    main()
