"""gdino-lab inspect: every field of transformers' output, and the flag that fills what is None."""

from __future__ import annotations

import re

import torch

from gdino_lab.commands.inspect import FLAGS, rows_of
from gdino_lab.models.grounding_dino import build
from tests.conftest import SMALL
from tests.models.test_export import NANO


def test_flags_fill_what_they_say():
    """Each None of a plain pass is filled by its flag; nothing else is None."""
    torch.manual_seed(0)
    model, processor = build("grounding_dino", config=NANO | {"auxiliary_loss": True})
    inputs = dict(processor.tokenizer("nut . washer .", return_tensors="pt"))
    inputs |= {"pixel_values": torch.randn(1, 3, 64, 96), "pixel_mask": torch.ones(1, 64, 96, dtype=torch.long)}
    with torch.no_grad():
        plain = model.eval()(**inputs)
        labels = [{"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2]])}]
        full = model(**inputs, labels=labels, output_hidden_states=True, output_attentions=True)
    empty = {name for name in plain.__dataclass_fields__ if getattr(plain, name) is None}
    assert empty == set(FLAGS)
    assert all(getattr(full, name) is not None for name in full.__dataclass_fields__)


def test_rows_tell_shape_range_and_nan():
    (row,) = rows_of("logits", torch.tensor([[1.0, float("nan"), -2.5]]))
    assert row == ["logits", "1x3", "float32", "cpu", "-2.5", "1", "1", ""]
    assert list(rows_of("loss", None))[0][-1] == "labels=..."
    nested = list(rows_of("attentions", ((torch.zeros(2, dtype=torch.int64),), None)))
    assert [row[0] for row in nested] == ["attentions[0][0]", "attentions[1]"]


def test_inspect_prints_every_field(gdino, small_set):
    ended = gdino("inspect", *SMALL, f"data.root={small_set}").assert_done()
    for field in ("logits", "pred_boxes", "encoder_last_hidden_state_vision", "auxiliary_outputs", "input_ids"):
        assert re.search(rf"│ {field} ", ended.out), ended.out
    assert "output_hidden_states=True" in ended.out
