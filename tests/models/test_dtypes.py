"""A clash of dtypes names the module, what came in and what its weights are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gdino_lab.models.box_detector import BoxDetector
from gdino_lab.models.dtypes import DtypeClash, telling_clashes
from gdino_lab.models.grounding_dino import build
from gdino_lab.models.prompts import Vocabulary, padded
from tests.models.test_export import NANO

PARTS = {
    "detector.model.encoder.layers.1.text_enhancer_layer.fc1": "Linear",
    "detector.model.input_proj_vision.0.0": "Conv2d",
    "detector.model.decoder.layers.0.fc1": "Linear",
}


@pytest.mark.parametrize("path", PARTS)
@pytest.mark.parametrize(("weights", "odd"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_the_module_is_named(path, weights, odd):
    torch.manual_seed(0)
    detector, processor = build("grounding_dino", config=NANO)
    module = BoxDetector(detector).to(weights).train()
    module.get_submodule(path).to(odd)
    text = padded([Vocabulary(["nut"], processor.tokenizer).prompt()], 0)
    inputs = {"pixel_values": torch.zeros(1, 3, 64, 96, dtype=weights), "pixel_mask": torch.ones(1, 64, 96, dtype=torch.long)}

    def forward():
        return module(**inputs, **text)

    with pytest.raises(DtypeClash) as caught, telling_clashes(module, forward):
        forward()
    came, are = (str(each).removeprefix("torch.") for each in (weights, odd))
    assert f"{path} ({PARTS[path]}) got {came}, its weights are {are}" in str(caught.value)


def test_other_errors_pass_through_and_no_hook_stays():
    layer = nn.Linear(3, 3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), telling_clashes(layer, lambda: None):
        layer(torch.zeros(2, 4))
    with pytest.raises(RuntimeError) as caught, telling_clashes(layer, lambda: layer(torch.zeros(2, 3).double())):
        layer(torch.zeros(2, 3).double())
    assert isinstance(caught.value, DtypeClash)
    assert not layer._forward_hooks and not layer._forward_pre_hooks
