"""Tokens, masks and targets against the model's own and plain loops; the heads ignore padding and keep the batch."""

import copy
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gdino_lab.models.anomaly_detector import (
    AnomalyDetector,
    AnomalyHeads,
    heatmap,
    kind_targets,
    level_sizes,
    mean_and_std,
    token_mask,
    token_targets,
)
from gdino_lab.models.grounding_dino import build

NANO = Path(__file__).parents[2] / "conf" / "model" / "nano.yaml"
SIZES = [(64, 64), (97, 131), (32, 32), (33, 50), (65, 200), (191, 61), (128, 96)]


@pytest.fixture(scope="module")
def nano() -> tuple[AnomalyDetector, dict]:
    torch.manual_seed(0)
    detector, processor = build("grounding_dino", config=yaml.safe_load(NANO.read_text())["model"]["config"])
    prompt = processor.tokenizer(["long screw . nut .", "washer . nut ."], padding=True, return_tensors="pt")
    return AnomalyDetector(detector, part_kinds=3).eval(), prompt


def inputs(prompt, size, valid_sizes, seed=0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.zeros(len(valid_sizes), 3, *size)
    mask = torch.zeros(len(valid_sizes), *size, dtype=torch.long)
    for row, (height, width) in enumerate(valid_sizes):
        pixels[row, :, :height, :width] = torch.randn(3, height, width, generator=generator)
        mask[row, :height, :width] = 1
    return {"pixel_values": pixels, "pixel_mask": mask} | {
        name: value[: len(valid_sizes)] for name, value in prompt.items()
    }


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tokens_and_their_mask_are_the_models_own(nano, size):
    """The encoder is listened to: level shapes, number of tokens, and which of them it takes for padding."""
    model, prompt = nano
    seen = {}
    handle = model.detector.model.encoder.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    batch = inputs(prompt, size, [size, (max(1, size[0] // 2 + 3), max(1, size[1] // 3))])
    with torch.no_grad():
        outputs = model(**batch)
    handle.remove()
    sizes = level_sizes(model.detector.config, *size)
    assert sizes == [tuple(map(int, shape)) for shape in seen["spatial_shapes_list"]]
    assert seen["vision_features"].shape[1] == sum(height * width for height, width in sizes)
    assert torch.equal(token_mask(batch["pixel_mask"], sizes), ~seen["vision_attention_mask"])
    assert outputs["valid"][0].all() and not outputs["valid"][1].all() and outputs["valid"][1].any()


@given(st.integers(1, 2000), st.integers(1, 2000))
@settings(max_examples=60, deadline=None)
def test_level_sizes_are_those_of_strided_convolutions(nano, height, width):
    def halved(side: int) -> int:  # a 3-wide convolution of stride 2, padded by 1
        return (side + 2 - 3) // 2 + 1

    expected = [tuple(math.ceil(side / stride) for side in (height, width)) for stride in (8, 16, 32)]
    expected.append(tuple(map(halved, expected[-1])))
    assert level_sizes(nano[0].detector.config, height, width) == expected


@pytest.mark.parametrize("size", [(64, 64), (97, 131), (45, 30)], ids=str)
def test_a_token_is_changed_where_any_pixel_under_it_is(size):
    rng = np.random.default_rng(0)
    changed = rng.random((2, *size)) < 0.01
    sizes = [tuple(math.ceil(side / stride) for side in size) for stride in (8, 16)]
    targets = token_targets(torch.from_numpy(changed), sizes)
    expected = [[], []]
    for b in range(2):
        for rows, cols in sizes:
            for y, x in np.ndindex(rows, cols):
                top, bottom = y * size[0] // rows, -(-(y + 1) * size[0] // rows)
                left, right = x * size[1] // cols, -(-(x + 1) * size[1] // cols)
                expected[b].append(float(changed[b, top:bottom, left:right].any()))
    assert targets.dtype == torch.float32 and targets.tolist() == expected


def test_no_changed_pixel_is_lost_however_small():
    sizes = [(13, 17), (7, 9), (4, 5), (2, 3)]
    for y, x in [(0, 0), (96, 130), (48, 65), (7, 8), (95, 1)]:
        changed = torch.zeros(1, 97, 131, dtype=torch.bool)
        changed[0, y, x] = True
        per_level = token_targets(changed, sizes).split([h * w for h, w in sizes], 1)
        assert all(1 <= level.sum() <= 4 for level in per_level)  # bins overlap by a pixel at most


def test_kinds_are_shares_of_a_tokens_pixels():
    rng = np.random.default_rng(0)
    kinds = rng.integers(0, 4, (2, 45, 30)).astype(np.uint8)
    targets = kind_targets(torch.from_numpy(kinds), (6, 4), 4)
    assert targets.shape == (2, 24, 5) and targets.dtype == torch.float32
    for b, (y, x) in ((b, place) for b in range(2) for place in np.ndindex(6, 4)):
        window = kinds[b, y * 45 // 6 : -(-(y + 1) * 45 // 6), x * 30 // 4 : -(-(x + 1) * 30 // 4)]
        shares = np.bincount(window.ravel(), minlength=5) / window.size
        assert np.allclose(targets[b, y * 4 + x].numpy(), shares, atol=1e-6)
    assert torch.allclose(targets.sum(-1), torch.ones(2, 24))


@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 12), st.integers(1, 4))
@settings(deadline=None, max_examples=50)
def test_mean_and_std_are_numpys_over_valid_tokens(seed, size, tokens, width):
    rng = np.random.default_rng(seed)
    values, valid = rng.normal(size=(size, tokens, width)), rng.random((size, tokens)) < 0.6
    mean, std = (found.numpy() for found in mean_and_std(torch.from_numpy(values), torch.from_numpy(valid)))
    for b in range(size):
        chosen = values[b, valid[b]] if valid[b].any() else np.zeros((1, width))
        assert np.allclose(mean[b], chosen.mean(0)) and np.allclose(std[b], np.sqrt(chosen.var(0) + 1e-6))


HEAD_SIZES = [(3, 4), (2, 2)]
TOKENS = 16


def head_inputs(size=2, seed=0) -> dict:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(size, *shape, generator=generator)

    return {
        "vision": random(TOKENS, 8),
        "text": random(5, 8),
        "text_mask": torch.tensor([True, True, True, False, False]).repeat(size, 1),
        "queries": random(6, 8),
        "valid": torch.rand(size, TOKENS, generator=generator) < 0.7,
        "sizes": HEAD_SIZES,
    }


@pytest.fixture(scope="module")
def heads() -> AnomalyHeads:
    torch.manual_seed(0)
    return AnomalyHeads(8, levels=2, part_kinds=3).eval()


IMAGE_WISE = ("global_logit", "histogram", "pooled")


def test_what_lies_in_padding_changes_no_output(heads):
    batch = head_inputs()
    noisy = batch | {
        "vision": torch.where(batch["valid"][..., None], batch["vision"], torch.tensor(50.0)),
        "text": torch.where(batch["text_mask"][..., None], batch["text"], torch.tensor(-30.0)),
    }
    before, after = heads(**batch), heads(**noisy)
    for name in IMAGE_WISE:
        torch.testing.assert_close(before[name], after[name], rtol=0, atol=1e-5)
    torch.testing.assert_close(
        before["local_logits"][batch["valid"]], after["local_logits"][batch["valid"]], rtol=0, atol=1e-5
    )
    moved = heads(**batch | {"vision": batch["vision"] + batch["valid"][..., None] * torch.linspace(-1, 2, 8)})
    assert not any(torch.allclose(before[name], moved[name], atol=1e-4) for name in ("global_logit", "pooled"))


def test_an_image_alone_and_in_a_batch_is_the_same_to_the_heads(heads):
    batch = head_inputs(3)
    together = heads(**batch)
    for row in range(3):
        alone = heads(**{name: value if name == "sizes" else value[row : row + 1] for name, value in batch.items()})
        for name, value in together.items():
            torch.testing.assert_close(alone[name], value[row : row + 1], rtol=0, atol=1e-5)


def test_the_global_logit_does_not_hang_on_the_order_of_tokens_or_queries(heads):
    batch = head_inputs()
    order = torch.cat([torch.randperm(12), 12 + torch.randperm(4)])
    shuffled = batch | {
        "vision": batch["vision"][:, order],
        "valid": batch["valid"][:, order],
        "queries": batch["queries"][:, torch.randperm(6)],
    }
    torch.testing.assert_close(heads(**batch)["global_logit"], heads(**shuffled)["global_logit"], rtol=0, atol=1e-5)


def test_pooled_is_the_mean_of_each_levels_valid_tokens(heads):
    batch = head_inputs()
    expected = [
        torch.cat([batch["vision"][b, part][batch["valid"][b, part]].mean(0) for part in (slice(12), slice(12, None))])
        for b in range(2)
    ]
    torch.testing.assert_close(heads(**batch)["pooled"], torch.stack(expected))


def test_the_histogram_is_the_mean_share_of_each_kind_without_background(heads):
    batch = head_inputs()
    outputs = heads(**batch)
    shares = outputs["kind_logits"].softmax(-1)
    expected = torch.stack([shares[b, batch["valid"][b, :12]].mean(0)[1:] for b in range(2)])
    torch.testing.assert_close(outputs["histogram"], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 2])
def test_shapes_keep_the_batch_and_outputs_are_single_precision(nano, dtype, size):
    model, prompt = nano
    cast = model if dtype == torch.float32 else copy.deepcopy(model).to(dtype)
    batch = inputs(prompt, (97, 131), [(97, 131), (64, 80)][:size])
    with torch.no_grad():
        outputs = cast(**batch | {"pixel_values": batch["pixel_values"].to(dtype)})
    valid = outputs.pop("valid")
    assert valid.shape == (size, 310) and valid.dtype == torch.bool
    assert {name: tuple(value.shape) for name, value in outputs.items()} == {
        "global_logit": (size,),
        "local_logits": (size, 310),
        "kind_logits": (size, 13 * 17, 4),
        "histogram": (size, 3),
        "pooled": (size, 4 * 64),
    }
    assert all(value.dtype == torch.float32 and value.isfinite().all() for value in outputs.values())
    if dtype == torch.bfloat16:
        with torch.no_grad():
            whole = model(**batch)
        assert (whole["global_logit"] - outputs["global_logit"]).abs().max() < 0.2


def test_images_in_a_batch_do_not_mix(nano):
    """Of one size, so nothing is padded: alone and beside another an image gives the same, rounding apart."""
    model, prompt = nano
    batch = inputs(prompt, (64, 80), [(64, 80), (64, 80)])
    with torch.no_grad():
        both = model(**batch)
        for row in range(2):
            alone = model(**{name: value[row : row + 1] for name, value in batch.items()})
            for name, value in both.items():
                torch.testing.assert_close(alone[name], value[row : row + 1], rtol=0, atol=1e-3)


def test_heads_backbone_text_tower_encoder_and_decoder_all_get_a_gradient(nano):
    model, prompt = copy.deepcopy(nano[0]), nano[1]
    outputs = model(**inputs(prompt, (64, 80), [(64, 80)]))
    sum(value.square().sum() for name, value in outputs.items() if name != "valid").backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    moved = {name for name, gradient in gradients.items() if gradient is not None and gradient.any()}
    assert {f"heads.{name}" for name, _ in model.heads.named_parameters()} <= moved
    for part in ("backbone.", "text_backbone.", "encoder.layers.0.", "encoder.layers.1.", "decoder.layers.1."):
        names = {name for name in gradients if name.startswith(f"detector.model.{part}")}
        assert len(names & moved) > 0.7 * len(names) > 0, part


def test_a_fresh_model_calls_no_token_anomalous(nano):
    model, prompt = nano
    with torch.no_grad():
        outputs = model(**inputs(prompt, (64, 80), [(64, 80)]))
    assert outputs["local_logits"].sigmoid().max() < 0.1


def test_heatmap_is_the_mean_of_the_levels_probabilities():
    sizes = [(4, 6), (2, 3)]
    logits = 5 * torch.randn(2, 30, generator=torch.Generator().manual_seed(0))
    found = heatmap(logits, sizes, 31, 45)
    assert found.shape == (2, 31, 45) and 0 <= found.min() and found.max() <= 1
    for constant in (-3.0, 2.0):
        even = heatmap(torch.full((1, 30), constant), sizes, 8, 12)
        torch.testing.assert_close(even, torch.full((1, 8, 12), constant).sigmoid())
    split = heatmap(torch.cat([torch.full((1, 24), 50.0), torch.full((1, 6), -50.0)], 1), sizes, 8, 12)
    torch.testing.assert_close(split, torch.full((1, 8, 12), 0.5))
    hot = torch.full((1, 30), -50.0)
    hot[0, 1 * 6 + 4] = hot[0, 24 + 0 * 3 + 2] = 50.0  # row 1, column 4 of 4x6; row 0, column 2 of 2x3
    peak = heatmap(hot, sizes, 40, 60)[0]
    y, x = divmod(int(peak.argmax()), 60)
    assert 10 <= y < 20 and 40 <= x < 60
