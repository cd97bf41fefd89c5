"""Models of a Hugging Face hub.

It is reached as `huggingface_hub` is told: HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE.
"""

from __future__ import annotations

from pathlib import Path

from infra.models.errors import ModelUnavailable

# Forms of the weights that vLLM does not load.
_UNUSED = ["original/*", "onnx/*", "*.onnx", "*.gguf", "*.msgpack", "*.h5", "*.tflite", "*.mlmodel"]


def snapshot(name: str) -> Path:
    """Directory of a hub's model as it is now, downloaded but for what the cache has.

    Raises:
        ModelUnavailable: the hub has no such model, refuses it, or cannot be reached and the cache has it not.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    where = f"the hub at {constants.ENDPOINT}"
    elsewhere = "or copy a checkpoint's directory here and name that"
    try:
        return Path(snapshot_download(name, ignore_patterns=_UNUSED))
    except HFValidationError as error:
        raise ModelUnavailable(f"{name} is neither a directory nor the name of a hub's model: {error}") from error
    except GatedRepoError as error:
        raise ModelUnavailable(
            f"{where} gives {name} to those alone who accepted its terms: do so there, and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelUnavailable(
            f"{where} knows no model {name}, or it is private: check the name, or set HF_TOKEN"
        ) from error
    except LocalEntryNotFoundError as error:
        if constants.HF_HUB_OFFLINE:
            raise ModelUnavailable(
                f"{name} is no directory, not in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids to ask "
                f"{where}: unset it, {elsewhere}"
            ) from error
        raise ModelUnavailable(
            f"{name} is no directory, and {where} cannot be reached: check the network, set HF_ENDPOINT to a mirror, "
            f"{elsewhere}"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelUnavailable(f"{name} could not be downloaded from {where}: {error}; try again") from error
