"""Predictions for the criterion: transformers' own numbers, with gradients where transformers has none."""

from __future__ import annotations

import pytest
import torch

from gdino_lab.losses.detection import Targets, Weights, detection_losses
from gdino_lab.models.box_detector import BoxDetector, class_scores
from gdino_lab.models.grounding_dino import build
from gdino_lab.models.prompts import Vocabulary, padded
from tests.models.test_export import NANO

ARCHITECTURES = ["grounding_dino", "mm_grounding_dino"]


def setting(architecture: str):
    torch.manual_seed(0)
    detector, processor = build(architecture, config=NANO)
    vocabulary = Vocabulary(["long screw", "nut", "washer"], processor.tokenizer)
    text = padded([vocabulary.prompt(), vocabulary.prompt([1])], 0)
    pixel_mask = torch.ones(2, 64, 96, dtype=torch.long)
    pixel_mask[1, :, 80:] = 0
    inputs = {"pixel_values": torch.randn(2, 3, 64, 96) * pixel_mask[:, None], "pixel_mask": pixel_mask, **text}
    return BoxDetector(detector), inputs, vocabulary


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request):
    return setting(request.param)


def test_the_final_layer_is_what_plain_transformers_answers(case):
    module, inputs, _ = case
    module.eval()
    with torch.no_grad():
        found, expected = module(**inputs), module.detector(**inputs)
    length = inputs["input_ids"].shape[1]
    assert found["logits"].shape == (1, 2, 20, length)
    torch.testing.assert_close(found["logits"][-1], expected.logits[..., :length])
    torch.testing.assert_close(found["boxes"][-1], expected.pred_boxes, rtol=0, atol=1e-6)


def test_the_encoder_set_is_the_decoders_start_but_depends_on_the_image_and_trains(case):
    """transformers' encoder_pred_boxes are detached, its encoder_logits the same for any two images."""
    module, inputs, vocabulary = case
    module.train()
    outputs, upstream = module(**inputs), module.detector.model(**inputs)
    assert len(outputs["logits"]) == 1 + NANO["decoder_layers"]
    torch.testing.assert_close(outputs["boxes"][0], upstream.init_reference_points)
    assert not torch.equal(outputs["logits"][0, 0], outputs["logits"][0, 1])
    tokens = torch.zeros(2, 2, inputs["input_ids"].shape[1], dtype=torch.bool)
    tokens[0, 0], tokens[0, 1] = vocabulary.prompt().tokens_of([0, 2], tokens.shape[-1])
    tokens[1, 0] = vocabulary.prompt([1]).tokens_of([1], tokens.shape[-1])[0]
    boxes = torch.tensor([[[0.3, 0.4, 0.2, 0.2], [0.7, 0.5, 0.1, 0.3]], [[0.5, 0.5, 0.4, 0.4], [0, 0, 0, 0]]])
    terms = detection_losses(
        outputs["logits"], outputs["boxes"], outputs["text_mask"], Targets(boxes, tokens, (2, 1)), 3.0, Weights()
    )
    module.zero_grad()
    sum(value for name, value in terms.items() if name.endswith("_enc")).backward()
    trained = {name for name, parameter in module.detector.named_parameters() if parameter.grad is not None}
    for part in ("model.enc_output.weight", "model.enc_output_norm.weight", "model.encoder_output_bbox_embed.layers.2.weight"):
        assert part in trained
        assert module.detector.get_parameter(part).grad.abs().max() > 0
    decoder = module.detector.model.decoder.layers.parameters()
    assert not any(parameter.grad.any() for parameter in decoder if parameter.grad is not None)


def test_every_parameter_but_one_unused_norm_gets_a_gradient(case):
    module, inputs, _ = case
    module.train()
    outputs = module(**inputs)
    module.zero_grad()
    logits = outputs["logits"].masked_fill(~outputs["text_mask"][:, None], 0.0)
    (logits.sum() + outputs["boxes"].sum()).backward()
    silent = {name for name, parameter in module.named_parameters() if parameter.grad is None}
    assert {name.rpartition(".")[0] for name in silent} == {"detector.model.backbone.conv_encoder.model.swin.layernorm"}


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_boxes_and_logits_are_fp32_whatever_the_weights(case, dtype):
    module, inputs, _ = setting("grounding_dino")
    module.to(dtype).train()
    outputs = module(**(inputs | {"pixel_values": inputs["pixel_values"].to(dtype)}))
    assert outputs["logits"].dtype == outputs["boxes"].dtype == torch.float32
    # Finer than bf16 can say: its steps near 0.75 are 1/256.
    assert (outputs["boxes"][-1] != outputs["boxes"][-1].to(dtype).float()).any()


def test_one_class_a_box_by_hand():
    """'cat' is token 1, 'big dog' tokens 2 and 3; thresholding tokens would have glued 'cat dog' together."""
    tokens = torch.zeros(1, 3, 4, dtype=torch.bool)
    tokens[0, 0, 1] = tokens[0, 1, 2] = tokens[0, 1, 3] = True
    probability = torch.tensor([[[0.9, 0.6, 0.5, 0.8], [0.0, 0.7, 0.9, 0.4]]])
    logits = torch.logit(probability, eps=1e-6)
    scores, classes = class_scores(logits, tokens, "mean")
    torch.testing.assert_close(scores, torch.tensor([[0.65, 0.7]]), rtol=0, atol=1e-5)
    assert classes.tolist() == [[1, 0]]
    scores, classes = class_scores(logits, tokens, "max")
    torch.testing.assert_close(scores, torch.tensor([[0.8, 0.9]]), rtol=0, atol=1e-5)
    assert classes.tolist() == [[1, 1]]


def test_a_class_that_was_not_asked_for_is_never_the_answer():
    tokens = torch.zeros(2, 2, 3, dtype=torch.bool)
    tokens[0, 0, 1] = tokens[1, 0, 1] = tokens[1, 1, 2] = True
    logits = torch.full((2, 5, 3), -torch.inf)
    for reduction in ("mean", "max"):
        scores, classes = class_scores(logits, tokens, reduction)
        assert (classes[0] == 0).all() and (scores == 0).all()


def test_micro_batches_add_up_to_the_gradient_of_the_batch(case):
    """Four images with 2, 0, 1 and 1 boxes under two prompts: one batch, or four passes with the same normaliser."""
    module, inputs, vocabulary = case
    module.train()
    torch.manual_seed(1)
    inputs = {key: value.repeat(2, *[1] * (value.ndim - 1)) for key, value in inputs.items()}
    inputs["pixel_values"], inputs["pixel_mask"] = torch.randn(4, 3, 64, 96), torch.ones(4, 64, 96, dtype=torch.long)
    length = inputs["input_ids"].shape[1]
    counts = (2, 0, 1, 1)
    boxes = torch.rand(4, 2, 4) * 0.4 + 0.2
    tokens = torch.zeros(4, 2, length, dtype=torch.bool)
    tokens[[0, 0, 2], [0, 1, 0]] = vocabulary.prompt().tokens_of([0, 2, 1], length)
    tokens[3, 0] = vocabulary.prompt([1]).tokens_of([1], length)[0]

    def gradients(parts: list[slice]) -> dict[str, torch.Tensor]:
        module.zero_grad()
        for part in parts:
            outputs = module(**{key: value[part] for key, value in inputs.items()})
            targets = Targets(boxes[part], tokens[part], counts[part])
            terms = detection_losses(
                outputs["logits"], outputs["boxes"], outputs["text_mask"], targets, sum(counts) / len(parts), Weights()
            )
            (sum(terms.values()) / len(parts)).backward()
        return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}

    whole, cut = gradients([slice(0, 4)]), gradients([slice(row, row + 1) for row in range(4)])
    assert whole.keys() == cut.keys()
    scale = max(gradient.abs().max() for gradient in whole.values())
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-4, atol=1e-5 * scale.item(), msg=name)
