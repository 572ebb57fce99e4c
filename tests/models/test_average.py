"""The moving average of the weights against its recurrence, and standing in for the weights and back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gdino_lab.models.average import WeightAverage


def module() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    layers[1].bias.requires_grad_(False)
    return layers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_follow_the_recurrence(dtype):
    layers = module().to(dtype)
    average = WeightAverage(layers, 0.9)
    expected = layers[0].weight.detach().double()
    for step in range(1, 40):
        with torch.no_grad():
            layers[0].weight.add_(0.1)
        average.update()
        decay = min(0.9, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * layers[0].weight.detach().double()
    assert len(average.averages) == 3 and average.averages[0].dtype == torch.float32
    torch.testing.assert_close(average.averages[0].double(), expected, rtol=1e-5, atol=1e-6)


def test_averages_stand_in_and_the_weights_come_back_to_the_bit():
    layers = module()
    average = WeightAverage(layers, 0.9)
    with torch.no_grad():
        layers[0].weight.add_(1.0)
    average.update()
    before = {name: value.clone() for name, value in layers.state_dict().items()}
    with pytest.raises(RuntimeError), average.in_place():
        assert torch.equal(layers[0].weight, average.averages[0]) and not torch.equal(layers[0].weight, before["0.weight"])
        raise RuntimeError
    assert all(torch.equal(value, before[name]) for name, value in layers.state_dict().items())


def test_it_begins_anew_at_the_weights_as_they_are():
    layers = module()
    average = WeightAverage(layers, 0.99)
    with torch.no_grad():
        layers[0].weight.mul_(1.1)
    average.update()
    average.restart()
    assert average.updates == 0
    assert all(torch.equal(one, two) for one, two in zip(average.averages, average.parameters, strict=True))
