"""Recomputing activations alters no bit: not of the loss, not of a gradient, not of a name."""

import copy
from pathlib import Path

import pytest
import torch
import yaml

from gdino_lab.models.grounding_dino import build
from gdino_lab.models.recompute import LAYERS, recompute_activations

NANO = yaml.safe_load((Path(__file__).parents[2] / "conf" / "model" / "nano.yaml").read_text())["model"]["config"]
# Dropout and drop-path on, so that the generator's state matters.
NOISY = NANO | {
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
    "fusion_dropout": 0.1,
    "fusion_droppath": 0.3,
    "backbone_config": NANO["backbone_config"]
    | {"drop_path_rate": 0.3, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    "text_config": NANO["text_config"] | {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
}


@pytest.fixture(scope="module", params=["grounding_dino", "mm_grounding_dino"])
def pair(request):
    """The same model twice, the second with recompute, and a batch of two with padding."""
    torch.manual_seed(0)
    model, processor = build(request.param, config=NOISY)
    twin = copy.deepcopy(model)
    count = recompute_activations(twin)
    batch = dict(processor.tokenizer(["nut . washer .", "screw ."], padding=True, return_tensors="pt"))
    batch["pixel_values"] = torch.randn(2, 3, 64, 80)
    batch["pixel_mask"] = torch.ones(2, 64, 80, dtype=torch.long)
    batch["pixel_mask"][1, :, 50:] = 0
    return model, twin, batch, count


def loss_and_gradients(model, batch, seed: int):
    model.zero_grad()
    torch.manual_seed(seed)
    outputs = model.model(**batch)
    generator = torch.Generator().manual_seed(0)  # random weights: the mean square of what a norm gives is 1
    loss = sum(
        (value * torch.randn(value.shape, generator=generator)).mean()
        for value in (
            outputs.last_hidden_state,
            outputs.encoder_last_hidden_state_vision,
            outputs.encoder_last_hidden_state_text,
        )
    )
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_loss_and_every_gradient_are_the_same_to_the_bit(pair, mode):
    model, twin, batch, _ = pair
    model.train(mode == "train"), twin.train(mode == "train")
    loss, gradients = loss_and_gradients(model, batch, seed=5)
    twin_loss, twin_gradients = loss_and_gradients(twin, batch, seed=5)
    assert torch.equal(loss, twin_loss)
    assert gradients.keys() == twin_gradients.keys()
    assert sum(gradient is not None and bool(gradient.any()) for gradient in gradients.values()) > 200
    for name, gradient in gradients.items():
        assert (gradient is None) == (twin_gradients[name] is None), name
        assert gradient is None or torch.equal(gradient, twin_gradients[name]), name
    other, _ = loss_and_gradients(model, batch, seed=6)
    assert torch.equal(other, loss) == (mode == "eval")  # the seed matters in training, so the test could fail


def test_without_gradients_outputs_are_the_same(pair):
    model, twin, batch, _ = pair
    with torch.no_grad():
        plain, again = (each.eval().model(**batch).last_hidden_state for each in (model, twin))
    assert torch.equal(plain, again) and not again.requires_grad


def test_names_and_weights_stay(pair):
    model, twin, _, _ = pair
    before, after = model.state_dict(), twin.state_dict()
    assert list(before) == list(after) and all(torch.equal(before[name], after[name]) for name in before)
    assert [name for name, _ in model.named_modules()] == [name for name, _ in twin.named_modules()]
    model.load_state_dict(after, strict=True)


@pytest.mark.slow
def test_every_layer_is_covered_and_is_run_twice(pair):
    _, twin, batch, count = pair
    layers = [module for module in twin.modules() if type(module).__name__ in LAYERS]
    backbone, text, encoder, decoder = 5, 2, 2, 2  # of nano.yaml
    assert count == len(layers) == backbone + text + encoder + decoder
    inner = {"SwinLayer": "intermediate", "BertLayer": "intermediate"}
    runs = dict.fromkeys(layers, 0)

    def counted(layer):
        def hook(*_):
            runs[layer] += 1

        return hook

    handles = [
        getattr(layer, inner.get(type(layer).__name__, "self_attn"), None) or next(layer.children()) for layer in layers
    ]
    handles = [module.register_forward_hook(counted(layer)) for module, layer in zip(handles, layers, strict=True)]
    loss_and_gradients(twin.train(), batch, seed=1)
    for handle in handles:
        handle.remove()
    assert set(runs.values()) == {2}


def test_a_model_without_such_layers_is_left_alone():
    layer = torch.nn.Linear(2, 2)
    forward = layer.forward
    assert recompute_activations(torch.nn.Sequential(layer)) == 0 and layer.forward == forward


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("pair", ["grounding_dino"], indirect=True)  # half a minute each, of the same layers
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own tracing looks
def test_under_compile_every_gradient_is_the_plain_models(pair):
    """Captured without code generation, so that what is compared is the same arithmetic."""
    model, twin, batch, _ = pair
    loss, gradients = loss_and_gradients(model.eval(), batch, seed=5)
    plain = twin.eval().model
    try:
        twin.model = torch.compile(plain, backend="aot_eager")
        compiled_loss, compiled = loss_and_gradients(twin, batch, seed=5)
    finally:
        twin.model = plain
        torch._dynamo.reset()
    assert torch.equal(loss, compiled_loss)
    compiled = {name.replace("_orig_mod.", ""): gradient for name, gradient in compiled.items()}
    assert compiled.keys() == gradients.keys()
    for name, gradient in gradients.items():  # a compiled graph says zero where there is no gradient
        other = compiled[name] if compiled[name] is not None else torch.zeros(())
        assert torch.equal(torch.zeros_like(other) if gradient is None else gradient, other), name
