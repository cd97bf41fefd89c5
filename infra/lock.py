"""Write a lock file of the environment this runs in: `python -m infra.lock OUT` (`make lock`).

The environment that passed the tests is what gets locked: exact versions, each with the SHA-256 of the archive that pip
chooses for it on this platform. To move a version, install it into `.venv`, run the tests, then `make lock`.
"""

import json
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# Both arrive as CUDA builds; beside a CPU torch they break the import of transformers, and nothing here uses them.
EXCLUDED = ("torchaudio", "torchcodec")
# pip itself is not ours to pin, and the project is installed from its own sources.
NOT_LOCKED = ("pip", "orbitserve", *EXCLUDED)


def installed() -> list[str]:
    """`name==version` of every package of this environment that belongs into the lock."""
    excludes = [option for name in NOT_LOCKED for option in ("--exclude", name)]
    frozen = subprocess.run(
        [sys.executable, "-m", "pip", "list", "--format=freeze", *excludes], check=True, capture_output=True, text=True
    )
    return frozen.stdout.split()


def archive_hashes(pins: list[str]) -> dict[str, str]:
    """Per pin, the SHA-256 (hex) of the archive that pip would install.

    Downloads metadata, installs nothing.
    """
    local = [pin for pin in pins if "+" in pin]  # CPU builds, which lie in an index of their own
    index = ["--extra-index-url", cpu_index()]
    return _resolved([pin for pin in pins if pin not in local]) | (_resolved(local, index) if local else {})


def cpu_index() -> str:
    """The index of CPU builds that `bootstrap.sh` falls back to."""
    found = re.search(r"CPU_TORCH_INDEX=(\S+)", Path(__file__).with_name("bootstrap.sh").read_text())
    assert found is not None
    return found[1]


def _resolved(pins: list[str], options: Sequence[str] = ()) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        report, requirements = Path(folder, "report.json"), Path(folder, "pins.txt")
        requirements.write_text("\n".join(pins))
        dry_run = ["install", "-qq", "--dry-run", "--no-deps", "--ignore-installed"]
        subprocess.run(
            [sys.executable, "-m", "pip", *dry_run, *options, "--report", str(report), "-r", str(requirements)],
            check=True,
        )
        chosen = json.loads(report.read_text())["install"]
    hashes = {}
    for item in chosen:
        package = item["metadata"]
        hashes[f"{package['name']}=={package['version']}"] = item["download_info"]["archive_info"]["hashes"]["sha256"]
    return hashes


def render(hashes: dict[str, str]) -> str:
    """The lock file's text: one pin with its hash per entry, sorted, and nothing about where archives were found."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    header = [
        f"# CPU set for {platform.system()} {platform.machine()}, Python {python}.",
        "# Written by `make lock` from a tested environment; installed with --require-hashes --no-deps.",
        f"# Left out on purpose: {', '.join(EXCLUDED)} (CUDA builds that break transformers beside a CPU torch).",
    ]
    entries = [
        f"{pin} \\\n    --hash=sha256:{value}"
        for pin, value in sorted(hashes.items(), key=lambda item: item[0].lower())
    ]
    return "\n".join([*header, *entries, ""])


def main(out: Path) -> None:
    """Lock this environment into `out`.

    Raises:
        SystemExit: pip resolved a pin to something else than what is installed.
    """
    pins = installed()
    hashes = archive_hashes(pins)
    if len(hashes) != len(pins):
        raise SystemExit(f"pip resolved {len(hashes)} of {len(pins)} installed packages; {out} is left as it was")
    out.write_text(render(hashes))
    print(f"{len(hashes)} packages locked in {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
