"""Build Grounding DINO and its processor: from a hub id, a local folder, or with random weights."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    CONFIG_MAPPING,
    AutoProcessor,
    BertTokenizer,
    GroundingDinoConfig,
    GroundingDinoForObjectDetection,
    GroundingDinoProcessor,
    MMGroundingDinoConfig,
    MMGroundingDinoForObjectDetection,
    PreTrainedModel,
)
from transformers.models.grounding_dino.image_processing_pil_grounding_dino import GroundingDinoImageProcessorPil

from gdino_lab.errors import ConfigurationError, nearest

log = logging.getLogger(__name__)

ARCHITECTURES = {
    "grounding_dino": (GroundingDinoConfig, GroundingDinoForObjectDetection),
    "mm_grounding_dino": (MMGroundingDinoConfig, MMGroundingDinoForObjectDetection),
}

# A small WordPiece vocabulary for models with random weights, where no published tokenizer belongs to the weights.
# '[CLS]', '[SEP]', '.' and '?' sit at BERT's ids 101, 102, 1012 and 1029, because Grounding DINO's text mask looks
# for these numbers.
VOCABULARY = Path(__file__).with_name("vocab.txt")


def check(architecture: str, pretrained: str | None = None, config: dict[str, Any] | None = None) -> list[str]:
    """Complaints about the arguments of `build` that can be known without loading weights."""
    complaints = []
    if architecture not in ARCHITECTURES:
        names = ", ".join(ARCHITECTURES)
        complaints.append(f"model.architecture={architecture}: allowed are {names}." + nearest(architecture, ARCHITECTURES))
    elif pretrained is None:
        complaints += _config_complaints(ARCHITECTURES[architecture][0], config or {})
    elif Path(pretrained).is_dir():
        complaints += _folder_complaints(architecture, Path(pretrained))
    if pretrained is not None and not Path(pretrained).is_dir():
        complaints += _hub_complaints(pretrained)
    return complaints


def build(
    architecture: str, pretrained: str | None = None, config: dict[str, Any] | None = None
) -> tuple[PreTrainedModel, GroundingDinoProcessor]:
    """The detector in fp32 and the processor that belongs to it.

    Args:
        architecture: "grounding_dino" or "mm_grounding_dino".
        pretrained: hub id, local transformers folder, or None for random weights (uses torch's global generator).
        config: fields of the architecture's configuration class, for random weights only; nested dicts for
            `backbone_config` and `text_config`.

    Raises:
        ConfigurationError: the weights cannot be found or are of another architecture.
    """
    config_class, model_class = ARCHITECTURES[architecture]
    if pretrained is None:
        model = model_class(config_class(**config or {}))
        log.warning(
            "RANDOM WEIGHTS: model.pretrained is null, so this model knows nothing yet; "
            "model.pretrained=<hub id or folder> starts from published weights."
        )
        return model, random_weights_processor()
    complaints = check(architecture, pretrained)
    if complaints:
        raise ConfigurationError(complaints)
    try:
        # Of a folder without safetensors the pickle, read by an unpickler that makes tensors and nothing else.
        model = here_first(partial(model_class.from_pretrained, pretrained, dtype="float32", weights_only=True))
    except (OSError, ValueError, RuntimeError, ImportError, SafetensorError) as error:
        raise _cannot_load(pretrained, error) from None
    return model, build_processor(pretrained)


def skeleton(architecture: str, pretrained: str | None = None, config: dict[str, Any] | None = None) -> PreTrainedModel:
    """The detector without weights, on torch's default device: by a local folder's configuration, else by `config`,
    which describes the published weights too."""
    config_class, model_class = ARCHITECTURES[architecture]
    if pretrained is not None and Path(pretrained).is_dir():
        return model_class(config_class.from_pretrained(pretrained))
    return model_class(config_class(**config or {}))


def here_first(load: Callable[..., Any]) -> Any:
    """`load` from a folder or the cache and only where that does not do from the hub: one that cannot be reached is tried for
    half a minute a file."""
    try:
        return load(local_files_only=True)
    except OSError:
        return load()


def build_processor(pretrained: str | None = None, **_: Any) -> GroundingDinoProcessor:
    """The processor that belongs to `build(pretrained=...)`; a node's other arguments do not matter to it.

    Raises:
        ConfigurationError: it cannot be found.
    """
    if pretrained is None:
        return random_weights_processor()
    try:
        return here_first(_processor_of(pretrained))
    except (OSError, ValueError) as error:
        raise _cannot_load(pretrained, error) from None


def any_processor(pretrained: str | None = None, **_: Any) -> GroundingDinoProcessor:
    """The processor that belongs to the model or, where it is not on this machine, the shipped one: prompts come out about
    as long."""
    if pretrained is None:
        return random_weights_processor()
    try:
        return _processor_of(pretrained)(local_files_only=True)
    except (OSError, ValueError):
        return random_weights_processor()


def _processor_of(pretrained: str) -> Callable[..., GroundingDinoProcessor]:
    # Not `use_fast`: the torchvision processor is not installed, and PIL's needs nothing more.
    return partial(AutoProcessor.from_pretrained, pretrained, backend="pil", trust_remote_code=False)


def _cannot_load(pretrained: str, error: Exception) -> ConfigurationError:
    return ConfigurationError(
        f"model.pretrained={pretrained}: cannot be loaded: {(str(error) or type(error).__name__).splitlines()[0]} "
        "(allowed: a hub id that can be downloaded or is cached, a local transformers folder, or null)"
    )


def random_weights_processor() -> GroundingDinoProcessor:
    """PIL image processor with the shipped vocabulary."""
    return GroundingDinoProcessor(
        GroundingDinoImageProcessorPil(), BertTokenizer(vocab=str(VOCABULARY), do_lower_case=True)
    )


def _config_complaints(config_class: type, config: dict[str, Any], where: str = "model.config") -> list[str]:
    """Keys that the configuration class, or one nested in it, does not have, and what transformers itself refuses."""
    known = config_class().to_dict()
    complaints = [
        f"{where}.{key}: {config_class.__name__} has no such field.{nearest(key, known)}"
        for key in config
        if key not in known
    ]
    for key, value in config.items():
        if isinstance(value, dict) and "model_type" in value:
            if value["model_type"] in CONFIG_MAPPING:
                complaints += _config_complaints(CONFIG_MAPPING[value["model_type"]], value, f"{where}.{key}")
            else:
                complaints.append(f"{where}.{key}.model_type={value['model_type']}: transformers knows no such model")
    if not complaints:
        try:
            config_class(**config)
        except Exception as error:  # transformers' own checks raise several kinds
            complaints.append(f"{where}: {' '.join(str(error).split())}")
    return complaints


def _folder_complaints(architecture: str, folder: Path) -> list[str]:
    """A folder without a configuration, or with another architecture's."""
    try:
        config = json.loads((folder / "config.json").read_text())
        there = config["model_type"]
    except FileNotFoundError:
        return [f"model.pretrained={folder}: holds no config.json, so it is no model folder"]
    except (ValueError, KeyError, TypeError):
        return [f"model.pretrained={folder}: its config.json is no transformers configuration (no model_type in it)"]
    wanted = ARCHITECTURES[architecture][0].model_type
    if there != wanted:
        return [f"model.pretrained={folder}: holds a {there} model, model.architecture={architecture} wants {wanted}"]
    complaints = [
        f"model.pretrained={folder}: its config.json asks for code from elsewhere, {key}={value}, which is never run; remove it"
        for key, value in _fields(config)
        if key.endswith("attn_implementation") and "/" in str(value)  # transformers would fetch such a kernel and import it
    ]
    return complaints if list(folder.glob("*.safetensors")) else complaints + _pickle_complaints(folder)


def _fields(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every field of a configuration and of those nested in it."""
    for key, value in config.items():
        yield key, value
        if isinstance(value, dict):
            yield from _fields(value)


def _pickle_complaints(folder: Path) -> list[str]:
    """Pickles that are more than tensors. They are read by an unpickler that makes tensors and nothing else, so that nothing
    of what they ask for is done."""
    complaints = []
    for path in sorted(folder.glob("*.bin")):
        try:
            with warnings.catch_warnings(action="ignore"):
                torch.load(path, map_location="meta", weights_only=True)
        except Exception:  # noqa: BLE001  of any kind on broken files, and with messages that advise to trust the file
            complaints.append(
                f"model.pretrained={folder}: {path.name} is no file of weights: it is broken, or a pickle that wants code run, "
                "which is never done; allowed are safetensors, or a pickle of tensors alone"
            )
    return complaints


def _hub_complaints(hub_id: str) -> list[str]:
    """One complaint if neither the cache nor the hub has `hub_id`, else none."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    def complaint(why: str) -> list[str]:
        return [
            f"model.pretrained={hub_id}: {why}; download it where there is a network (`hf download {hub_id} "
            "--local-dir DIR`) and pass model.pretrained=DIR, or pass model.pretrained=null for random weights"
        ]

    try:
        if isinstance(try_to_load_from_cache(hub_id, "config.json"), str):
            return []
        HfApi().model_info(hub_id, timeout=10)
    except HFValidationError:
        return complaint("no such folder, and not the form of a hub id (NAMESPACE/NAME)")
    except OfflineModeIsEnabled:
        return complaint("not in the local cache, and HF_HUB_OFFLINE is set")
    except HfHubHTTPError as error:
        return complaint(f"not in the local cache, and the hub answered {error.response.status_code}")
    except Exception as error:  # the HTTP client's own network errors have no common base that is public
        return complaint(f"not in the local cache, and the hub cannot be reached ({type(error).__name__})")
    return []
