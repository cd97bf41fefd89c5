"""Small vision-language models that really read pages and bind across them; their training.

Their weights lie in this folder, one Hugging Face checkpoint per family, each with a card that says how it was trained
and what it scores. `python -m infra.reference make FAMILY` makes them anew.
"""

import hashlib
from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
DEFAULT_MODEL = "qwen2_5_vl"


def weights(family: str) -> Path:
    """The folder of a family's checkpoint.

    Raises:
        FileNotFoundError: none is bundled.
    """
    folder = WEIGHTS / family
    if not (folder / "config.json").exists():
        raise FileNotFoundError(f"no reference model of the family {family} is bundled")
    return folder


def digest(folder: Path) -> str:
    """SHA-256 of the weights in a checkpoint's folder; of none where none lie there."""
    found = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        found.update(file.read_bytes())
    return found.hexdigest()
