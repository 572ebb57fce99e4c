"""Build Grounding DINO and its processor: from a hub id, a local folder, or with random weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import (
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
    """Complaints about the arguments of `build` that can be known without loading anything."""
    complaints = []
    if architecture not in ARCHITECTURES:
        complaints.append(
            f"model.architecture={architecture}: allowed are {', '.join(ARCHITECTURES)}."
            + nearest(architecture, ARCHITECTURES)
        )
    elif pretrained is None:
        try:
            ARCHITECTURES[architecture][0](**config or {})
        except Exception as error:  # transformers' own checks raise several kinds
            complaints.append(f"model.config: {' '.join(str(error).split())}")
    if pretrained and Path(pretrained).exists():
        if not (Path(pretrained) / "config.json").is_file():
            complaints.append(f"model.pretrained={pretrained}: the folder holds no config.json, so it is no model folder")
    elif pretrained and not _cached(pretrained):
        complaints += _unreachable(pretrained)
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
    try:
        model = model_class.from_pretrained(pretrained, dtype="float32")
        # Not `use_fast`: the torchvision processor is not installed, and PIL's needs nothing more.
        processor = AutoProcessor.from_pretrained(pretrained, backend="pil")
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"model.pretrained={pretrained}: {str(error).splitlines()[0]} "
            "(allowed: a hub id that can be downloaded or is cached, a local transformers folder, or null)"
        ) from None
    return model, processor


def random_weights_processor() -> GroundingDinoProcessor:
    """PIL image processor with the shipped vocabulary."""
    return GroundingDinoProcessor(
        GroundingDinoImageProcessorPil(), BertTokenizer(vocab=str(VOCABULARY), do_lower_case=True)
    )


def _cached(hub_id: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(hub_id, "config.json"), str)


def _unreachable(hub_id: str) -> list[str]:
    """One complaint if the hub cannot give `hub_id`, else none."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, HfHubHTTPError, OfflineModeIsEnabled

    cure = (
        f"download it where there is a network (`hf download {hub_id} --local-dir DIR`) and pass model.pretrained=DIR, "
        "or pass model.pretrained=null for random weights"
    )
    try:
        HfApi().model_info(hub_id, timeout=10)
    except HFValidationError:
        return [f"model.pretrained={hub_id}: neither a folder nor a hub id (NAMESPACE/NAME); {cure}"]
    except OfflineModeIsEnabled:
        return [f"model.pretrained={hub_id}: not in the local cache and HF_HUB_OFFLINE is set; {cure}"]
    except HfHubHTTPError as error:
        return [f"model.pretrained={hub_id}: the hub answered {error.response.status_code}; {cure}"]
    except Exception as error:  # the HTTP client's own network errors have no common base that is public
        return [f"model.pretrained={hub_id}: not in the local cache and the hub cannot be reached ({type(error).__name__}); {cure}"]
    return []
