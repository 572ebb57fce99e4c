"""The first module whose output is NaN or infinite."""

from __future__ import annotations

import torch
from torch import nn

from gdino_lab.models.not_finite import find_not_finite


class Chain(nn.Module):
    """Two layers, then a mask of minus infinity as the models fill in for padding."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)
        self.mask = Masked()

    def forward(self, x):
        return {"logits": [self.mask(self.second(self.norm(self.first(x))))]}


class Masked(nn.Module):
    def forward(self, x):
        return x.masked_fill(torch.arange(x.shape[-1]) > 2, float("-inf"))


def test_first_module_that_is_not_finite_in_order_of_execution():
    module = Chain()
    assert find_not_finite(module, lambda: module(torch.ones(2, 4))) == {}
    module.second.weight.data[0, 0] = float("nan")
    found = find_not_finite(module, lambda: module(torch.ones(2, 4)))
    assert (found["module"], found["type"], found["nan"], found["of"]) == ("second", "Linear", 2, 8)
    assert (found["inputs_finite"], found["weights_finite"]) == (True, False)
    # An overflow, of either sign, is found where it happens and not where it becomes NaN.
    module.first.weight.data.fill_(-3e38)
    found = find_not_finite(module, lambda: module(torch.full((2, 4), 10.0)))
    assert (found["module"], found["infinite"], found["weights_finite"]) == ("first", 8, True)
    assert not module.first._forward_hooks
