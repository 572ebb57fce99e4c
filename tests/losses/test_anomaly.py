"""Each term of the anomaly objective against plain loops in double precision, and what holds for all of them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gdino_lab.losses.anomaly import anomaly_losses, dice, focal, soft_cross_entropy, top_mean

TERMS = ("global", "top", "focal", "dice", "parts")


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def bce(logit: float, target: float) -> float:
    return max(logit, 0) - logit * target + math.log1p(math.exp(-abs(logit)))


def reference(batch: dict, top_fraction: float) -> dict[str, float]:
    """Written from the formulas, one image and one token at a time."""
    size = len(batch["global_logit"])
    sums = dict.fromkeys(TERMS, 0.0)
    for b in range(size):
        anomalous, seen = float(batch["anomalous"][b]), float(batch["seen_locally"][b])
        places = [s for s in range(batch["valid"].shape[1]) if batch["valid"][b, s]]
        logits = [float(batch["local_logits"][b, s]) for s in places]
        targets = [float(batch["changed"][b, s]) * anomalous for s in places]
        sums["global"] += bce(float(batch["global_logit"][b]), anomalous)

        count = max(1, math.ceil(top_fraction * len(places)))
        sums["top"] += seen * bce(sum(sorted(logits)[::-1][:count]) / count, anomalous)

        summed = 0.0
        for logit, target in zip(logits, targets, strict=True):
            truth = target * sigmoid(logit) + (1 - target) * sigmoid(-logit)
            summed += (1 - truth) ** 2 * bce(logit, target)
        sums["focal"] += seen * summed / max(sum(targets), 0.01 * len(places))

        chances = [sigmoid(logit) for logit in logits]
        overlap = sum(2 * chance * target for chance, target in zip(chances, targets, strict=True))
        sums["dice"] += seen * (1 - (overlap + 1) / (sum(chances) + sum(targets) + 1))

        finest = [s for s in places if s < batch["kinds"].shape[1]]
        cross = 0.0
        for s in finest:
            row = [float(x) for x in batch["kind_logits"][b, s]]
            log_sum = max(row) + math.log(sum(math.exp(x - max(row)) for x in row))
            cross += sum(float(share) * (log_sum - x) for share, x in zip(batch["kinds"][b, s], row, strict=True))
        sums["parts"] += cross / max(1, len(finest))
    return {name: total / size for name, total in sums.items()}


def random_batch(seed: int, size: int, tokens: int, finest: int, classes: int, scale: float, positives: bool) -> dict:
    rng = np.random.default_rng(seed)
    valid = np.arange(tokens)[None] < rng.integers(1, tokens + 1, size)[:, None]
    valid[rng.integers(size)] = True  # the largest image of a batch has no padding
    batch = {
        "global_logit": scale * rng.normal(size=size),
        "local_logits": scale * rng.normal(size=(size, tokens)),
        "kind_logits": scale * rng.normal(size=(size, finest, classes)),
        "anomalous": (rng.random(size) < 0.5).astype(float) * positives,
        "seen_locally": (rng.random(size) < 0.7).astype(float),
        "changed": (rng.random((size, tokens)) < 0.2).astype(float) * positives,
        "kinds": rng.dirichlet(np.ones(classes), (size, finest)),
        "valid": np.array([rng.permutation(row) for row in valid]),
    }
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def losses(batch: dict, top_fraction: float = 0.125) -> dict[str, torch.Tensor]:
    targets = {name: batch[name] for name in ("anomalous", "seen_locally", "changed", "kinds", "valid")}
    logits = (batch["global_logit"], batch["local_logits"], batch["kind_logits"])
    return anomaly_losses(*logits, **targets, top_fraction=top_fraction)


@st.composite
def batches(draw, size=None) -> dict:
    tokens = draw(st.integers(1, 40))
    return random_batch(
        seed=draw(st.integers(0, 2**32 - 1)),
        size=draw(st.integers(1, 4)) if size is None else size,
        tokens=tokens,
        finest=draw(st.integers(1, tokens)),
        classes=draw(st.integers(2, 5)),
        scale=draw(st.sampled_from([0.0, 0.3, 4.0, 30.0])),
        positives=draw(st.booleans()),
    )


# Powers of two, so that the number of top tokens does not hang on how a product is rounded.
fractions = st.sampled_from([1.0, 0.5, 0.25, 0.125, 1 / 128])


@given(batches(), fractions)
@settings(deadline=None, max_examples=150)
def test_every_term_is_its_formula(batch, top_fraction):
    ours = losses(batch, top_fraction)
    assert tuple(ours) == TERMS
    for name, expected in reference(batch, top_fraction).items():
        # The share of positives that focal divides by at least, 1 % of the tokens, is rounded to single precision.
        assert ours[name].shape == () and ours[name].item() == pytest.approx(expected, rel=1e-7, abs=1e-12), name


@given(batches())
@settings(deadline=None, max_examples=30)
def test_single_precision_is_near_double(batch):
    single = {name: value if name == "valid" else value.float() for name, value in batch.items()}
    for name, term in losses(single).items():
        assert term.dtype == torch.float32
        assert term.item() == pytest.approx(losses(batch)[name].item(), rel=1e-4, abs=1e-5), name


def gradients(batch: dict, rows: slice) -> dict[tuple[str, str], torch.Tensor]:
    logits = ("global_logit", "local_logits", "kind_logits")
    leaves = {name: batch[name][rows].clone().requires_grad_() for name in logits}
    terms = losses({name: value[rows] for name, value in batch.items()} | leaves)
    found = {}
    for term, value in terms.items():
        grads = torch.autograd.grad(value, list(leaves.values()), retain_graph=True, allow_unused=True)
        for leaf, grad in zip(leaves, grads, strict=True):
            found[term, leaf] = torch.zeros_like(leaves[leaf]) if grad is None else grad
    return found


@given(batches(size=3))
@settings(deadline=None, max_examples=40)
def test_micro_batches_of_one_add_up_to_the_batch(batch):
    size = len(batch["global_logit"])
    rows = [slice(row, row + 1) for row in range(size)]
    singles = [losses({name: value[row] for name, value in batch.items()}) for row in rows]
    for name, whole in losses(batch).items():
        assert sum(single[name].item() for single in singles) / size == pytest.approx(whole.item(), rel=1e-9, abs=1e-12)
    parts = [gradients(batch, row) for row in rows]
    for key, whole in gradients(batch, slice(None)).items():
        torch.testing.assert_close(torch.cat([part[key] for part in parts]) / size, whole, rtol=1e-9, atol=1e-12)


@given(batches(size=3))
@settings(deadline=None, max_examples=40)
def test_rows_that_are_not_seen_locally_give_the_local_logits_no_gradient(batch):
    batch |= {"seen_locally": torch.tensor([1.0, 0.0, 1.0], dtype=torch.double)}
    for (term, leaf), grad in gradients(batch, slice(None)).items():
        if leaf == "local_logits":
            assert not grad[1].any()
            moves = batch["local_logits"].abs().max() < 10  # no sigmoid is flat
            assert term not in ("top", "dice") or not moves or (grad[0].any() and grad[2].any())
        if leaf == term + "_logit" and batch["global_logit"].abs().max() < 10:
            assert grad[1] != 0  # the image as a whole still teaches


@given(batches(), st.floats(-50, 50))
@settings(deadline=None, max_examples=40)
def test_padding_changes_nothing_and_gets_no_gradient(batch, noise):
    padding = ~batch["valid"]
    finest = padding[:, : batch["kinds"].shape[1]]
    other = batch | {
        "local_logits": batch["local_logits"].masked_fill(padding, noise),
        "changed": batch["changed"].masked_fill(padding, 1.0),
        "kind_logits": batch["kind_logits"].masked_fill(finest[..., None], noise),
    }
    for name, term in losses(other).items():
        assert term.item() == pytest.approx(losses(batch)[name].item(), rel=1e-9, abs=1e-12), name
    for (_, leaf), grad in gradients(batch, slice(None)).items():
        assert grad.isfinite().all()
        if leaf == "local_logits":
            assert not grad[padding].any()
        if leaf == "kind_logits":
            assert not grad[finest].any()


def test_an_image_with_nothing_changed_is_calm_only_if_its_logits_are():
    batch = random_batch(0, 2, 30, 20, 3, 1.0, positives=False)
    quiet = losses(batch | {"local_logits": torch.full((2, 30), -8.0, dtype=torch.double)})
    loud = losses(batch | {"local_logits": torch.full((2, 30), 8.0, dtype=torch.double)})
    for name in ("top", "focal", "dice"):
        assert 0 <= quiet[name] < 0.05 < loud[name] or not batch["seen_locally"].any()


def test_changed_pixels_of_an_image_called_normal_do_not_count():
    batch = random_batch(3, 2, 20, 10, 3, 1.0, positives=True) | {"anomalous": torch.zeros(2, dtype=torch.double)}
    blank = batch | {"changed": torch.zeros(2, 20, dtype=torch.double)}
    assert all(torch.equal(losses(batch)[name], losses(blank)[name]) for name in TERMS)


@pytest.mark.parametrize("name", ["anomalous", "seen_locally", "changed", "kinds"])
def test_a_target_of_another_shape_is_refused_by_name(name):
    batch = random_batch(0, 1, 12, 8, 3, 1.0, positives=True)
    for wrong in (batch[name][None], batch[name][..., None], batch[name].repeat(2, *[1] * (batch[name].dim() - 1))):
        with pytest.raises(ValueError, match=name):
            losses(batch | {name: wrong})


def test_the_top_of_an_image_is_at_least_one_token_and_never_padding():
    logits = torch.tensor([[1.0, 9.0, 3.0, 2.0], [5.0, -7.0, -6.0, 8.0]])
    valid = torch.tensor([[True, True, True, True], [False, True, True, False]])
    assert top_mean(logits, valid, 1e-6).tolist() == [9.0, -6.0]
    assert top_mean(logits, valid, 0.5).tolist() == [6.0, -6.0]
    assert top_mean(logits, valid, 1.0).tolist() == [3.75, -6.5]


def test_a_perfect_answer_costs_nothing():
    target = torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    valid = torch.ones(1, 4, dtype=torch.bool)
    perfect = 60 * (target - 0.5)
    assert focal(perfect, target, valid).item() == pytest.approx(0, abs=1e-6)
    assert dice(perfect, target, valid).item() == pytest.approx(0, abs=1e-6)
    assert dice(-perfect, target, valid).item() == pytest.approx(1 - 1 / 5)
    assert soft_cross_entropy(60 * target[..., None], torch.ones(1, 4, 1), valid).item() == 0
