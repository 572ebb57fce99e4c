"""What only a GPU can show of the criterion."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from gdino_lab.losses.detection import Targets, Weights, detection_losses

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_a_step_crosses_to_the_host_once():
    torch.manual_seed(0)
    sets, images, queries, length = 7, 4, 900, 40
    logits = torch.randn(sets, images, queries, length, device="cuda", requires_grad=True)
    boxes = (torch.rand(sets, images, queries, 4, device="cuda") * 0.3 + 0.3).requires_grad_()
    tokens = torch.rand(images, 20, length, device="cuda") < 0.1
    targets = Targets(torch.rand(images, 20, 4, device="cuda") * 0.2 + 0.3, tokens, (20, 3, 0, 11))
    text_mask = torch.ones(images, length, dtype=torch.bool, device="cuda")

    def step() -> None:
        sum(detection_losses(logits, boxes, text_mask, targets, 34.0, Weights()).values()).backward()

    step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as profiled:
        step()
    copies = [event for event in profiled.events() if "Memcpy DtoH" in event.name]
    assert len(copies) == 1
