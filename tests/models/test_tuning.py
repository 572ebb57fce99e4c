"""What each way of tuning lets move, and that merged adapters are the model that was trained."""

import copy
from pathlib import Path

import pytest
import torch
import yaml
from peft import LoraConfig, LoraModel

from gdino_lab.errors import ConfigurationError
from gdino_lab.models.grounding_dino import build
from gdino_lab.models.tuning import Frozen, Full, Lora

CONF = Path(__file__).parents[2] / "conf"
TARGETS = yaml.safe_load((CONF / "tuning" / "lora.yaml").read_text())["target_modules"]


def nano():
    torch.manual_seed(0)
    return build("grounding_dino", config=yaml.safe_load((CONF / "model" / "nano.yaml").read_text())["model"]["config"])


@pytest.fixture(scope="module")
def plain():
    return nano()[0].eval()


@pytest.fixture
def detector(plain):
    return copy.deepcopy(plain)


def trained(lora: Lora, detector):
    """Prepared, with adapters that do something (B starts at zero)."""
    prepared = lora.prepare(detector).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in prepared.named_parameters():
            if ".lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return prepared


def outputs(model):
    batch = nano()[1].tokenizer("long screw . nut .", return_tensors="pt")
    pixels = torch.randn(1, 3, 64, 80, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        found = model.model(pixel_values=pixels, pixel_mask=torch.ones(1, 64, 80, dtype=torch.long), **batch)
    return found.encoder_last_hidden_state_vision, found.encoder_last_hidden_state_text


@pytest.mark.parametrize(("tuning", "moves"), [(Full(), True), (Frozen(), False)], ids=["full", "frozen"])
def test_full_moves_everything_and_frozen_nothing(detector, tuning, moves):
    before = {name: value.clone() for name, value in detector.state_dict().items()}
    for start in (True, False):
        prepared = tuning.prepare(detector.requires_grad_(start))
        assert {parameter.requires_grad for parameter in prepared.parameters()} == {moves}
    weights = prepared.state_dict()
    assert weights.keys() == before.keys() and all(torch.equal(weights[name], before[name]) for name in before)
    assert tuning.plain(weights) == weights


def test_lora_moves_the_adapters_alone(detector):
    prepared = Lora(4, 8, 0.0, TARGETS).prepare(detector)
    moving = {name for name, parameter in prepared.named_parameters() if parameter.requires_grad}
    assert moving == {name for name, _ in prepared.named_parameters() if ".lora_" in name} != set()
    layers = {name.split(".lora_")[0] for name in moving}
    assert {layer.rpartition(".")[2] for layer in layers} == set(TARGETS)  # each named kind of layer was found
    assert len(moving) == 2 * len(layers)


def test_untrained_adapters_change_nothing(plain, detector):
    before, after = outputs(plain), outputs(Lora(4, 8, 0.0, TARGETS).prepare(detector).eval())
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


@pytest.mark.parametrize(("rank", "alpha", "targets"), [(4, 16, TARGETS), (1, 1, ["query", "fc2"]), (3, 0.5, ["fc1"])])
def test_merged_weights_are_pefts_own_merge(plain, detector, rank, alpha, targets):
    lora = Lora(rank, alpha, 0.0, targets)
    prepared = trained(lora, detector)
    merged = lora.plain(prepared.state_dict())

    # The reference: peft's wrapper around another copy, with the same adapters, merged by peft.
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=targets, bias="none")
    other = copy.deepcopy(plain)
    # peft 0.21 asks for it, and transformers has none for this model.
    other.get_input_embeddings = lambda: other.model.text_backbone.embeddings.word_embeddings
    reference = LoraModel(other, config, "default")
    state = {f"model.{name}": value for name, value in prepared.state_dict().items()}
    reference.load_state_dict(state, strict=True)
    expected = reference.merge_and_unload().state_dict()

    assert merged.keys() == expected.keys() == plain.state_dict().keys()
    for name, value in expected.items():
        torch.testing.assert_close(merged[name], value, rtol=0, atol=1e-6)
    changed = {name for name, value in plain.state_dict().items() if not torch.equal(value, merged[name])}
    assert changed and all(name.endswith(".weight") and name.split(".")[-2] in targets for name in changed)


def test_merged_weights_load_strictly_and_answer_as_the_adapters_did(plain, detector):
    lora = Lora(4, 16, 0.0, TARGETS)
    prepared = trained(lora, detector)
    fresh = nano()[0].eval()
    fresh.load_state_dict(lora.plain(prepared.state_dict()), strict=True)
    for tuned, merged, untuned in zip(outputs(prepared), outputs(fresh), outputs(plain), strict=True):
        torch.testing.assert_close(merged, tuned, rtol=0, atol=2e-4)
        assert (tuned - untuned).abs().max() > 0.05


def test_merging_leaves_its_input_and_the_precision_alone(detector):
    lora = Lora(2, 4, 0.0, TARGETS)
    weights = {name: value.bfloat16() for name, value in trained(lora, detector).state_dict().items()}
    before = {name: value.clone() for name, value in weights.items()}
    merged = lora.plain(weights)
    assert all(value.dtype == torch.bfloat16 for value in merged.values())
    assert weights.keys() == before.keys() and all(torch.equal(weights[name], before[name]) for name in before)


@pytest.mark.parametrize("targets", [["qeury"], ["no_such_layer", "nor_this"]], ids=str)
def test_layers_that_are_not_there_are_refused_by_key(detector, targets):
    with pytest.raises(ConfigurationError, match=r"tuning\.target_modules") as caught:
        Lora(4, 8, 0.0, targets).prepare(detector)
    assert targets[0] in str(caught.value)


@pytest.mark.parametrize("rank", [0, -1])
def test_ranks_below_one_are_refused_by_key(rank):
    with pytest.raises(ConfigurationError, match=rf"tuning\.rank={rank}"):
        Lora(rank, 8, 0.0, TARGETS)
