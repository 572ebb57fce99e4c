"""The detection objective against plain loops in double precision and against transformers', and what it survives."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.loss.loss_grounding_dino import GroundingDinoForObjectDetectionLoss

from gdino_lab.losses.detection import Targets, Weights, detection_losses, match
from tests.losses import reference_detection as reference

DEFAULT = Weights()
ODD = Weights(loss=(1.0, 3.0, 0.5), cost=(2.0, 1.0, 4.0), alpha=0.6)
# Two matchings whose costs are nearer than this may be told apart differently in single precision.
NEAR_TIE = 1e-2


@dataclass(frozen=True)
class Case:
    """What a model gave, in single precision, and what there was: each image with a prompt of its own."""

    logits: Tensor
    boxes: Tensor
    text_mask: Tensor
    targets: Targets
    label_maps: list[Tensor]  # of each image, (classes, L) bool
    labels: list[Tensor]  # of each image, (boxes,)

    def image(self, index: int) -> "Case":
        """One image alone, with as much padding as before."""
        rows = slice(index, index + 1)
        targets = Targets(self.targets.boxes[rows], self.targets.tokens[rows], self.targets.counts[rows])
        maps, labels = self.label_maps[rows], self.labels[rows]
        return Case(self.logits[:, rows], self.boxes[:, rows], self.text_mask[rows], targets, maps, labels)


def label_map(words: list[int]) -> Tensor:
    """(classes, L) bool, for classes of so many tokens in a prompt [CLS] class . class . [SEP]."""
    spans = torch.zeros(len(words), sum(words) + len(words) + 2, dtype=torch.bool)
    start = 1
    for c, length in enumerate(words):
        spans[c, start : start + length] = True
        start += length + 1
    return spans


def make_case(seed: int, prompts: list[list[int]], labels: list[list[int]], sets=3, queries=5, scale=1.0) -> Case:
    """`prompts`: tokens of each class of each image; `labels`: the class of each box of each image."""
    rng = np.random.default_rng(seed)
    maps = [label_map(words) for words in prompts]
    images, length = len(prompts), max(spans.shape[1] for spans in maps)
    counts = tuple(len(each) for each in labels)
    maps = [torch.nn.functional.pad(spans, (0, length - spans.shape[1])) for spans in maps]
    lengths = torch.tensor([sum(words) + len(words) + 2 for words in prompts])
    true = np.zeros((images, max(counts), 4))
    tokens = torch.zeros(images, max(counts), length, dtype=torch.bool)
    for b, classes in enumerate(labels):
        true[b, : counts[b]] = random_boxes(rng, counts[b])
        tokens[b, : counts[b]] = maps[b][torch.tensor(classes, dtype=torch.long)]
    return Case(
        torch.from_numpy(scale * rng.normal(size=(sets, images, queries, length))).float(),
        torch.from_numpy(random_boxes(rng, sets, images, queries)).float(),
        torch.arange(length) < lengths[:, None],
        Targets(torch.from_numpy(true).float(), tokens, counts),
        maps,
        [torch.tensor(classes, dtype=torch.long) for classes in labels],
    )


def random_boxes(rng, *shape: int) -> np.ndarray:
    return np.concatenate([rng.uniform(0.2, 0.8, (*shape, 2)), rng.uniform(0.05, 0.4, (*shape, 2))], -1)


@st.composite
def cases(draw) -> Case:
    queries, most = draw(st.sampled_from([(5, 3), (6, 1), (4, 4), (3, 5), (1, 3)]))
    prompts = draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=3))
    labels = [draw(st.lists(st.integers(0, len(words) - 1), max_size=most)) for words in prompts]
    scale = draw(st.sampled_from([0.1, 1.0, 2.0]))
    return make_case(draw(st.integers(0, 2**32 - 1)), prompts, labels, draw(st.integers(2, 3)), queries, scale)


MIXED = ([[1], [2, 1, 3], [1, 1]], [[0, 0], [2, 0, 1], []])


def losses(case: Case, normaliser: float = 3.0, weights: Weights = DEFAULT, function=detection_losses):
    """The terms, and the gradients of their sum by logits and boxes."""
    logits, boxes = case.logits.detach().requires_grad_(), case.boxes.detach().requires_grad_()
    terms = function(logits, boxes, case.text_mask, case.targets, normaliser, weights)
    return terms, torch.autograd.grad(sum(terms.values()), (logits, boxes), materialize_grads=True)


def close(ours: Tensor, other: Tensor, relative: float = 1e-5) -> bool:
    """To the largest of the numbers, as what cancels is only known to that."""
    return torch.allclose(ours.double(), other.double(), rtol=0, atol=relative * float(other.abs().max()) + 1e-12)


def double(case: Case) -> Case:
    return replace(case, logits=case.logits.double(), boxes=case.boxes.double())


@given(cases(), st.sampled_from([DEFAULT, ODD]), st.sampled_from([1.0, 2.5, 40.0]))
@settings(deadline=None, max_examples=80)
def test_terms_and_gradients_are_the_formulas(case, weights, normaliser):
    image, query, box = match(case.logits, case.boxes, case.targets, weights)
    ambiguous = False
    for s in range(len(case.logits)):
        for b in range(len(case.text_mask)):
            options = reference.image_matchings(case.logits[s], case.boxes[s], case.targets, weights, b)
            chosen = image[s] == b
            pairs = sorted(zip(query[s, chosen].tolist(), box[s, chosen].tolist(), strict=True))
            cost = {tuple(pairs): cost for cost, pairs in options}[tuple(pairs)]
            assert cost <= options[0][0] + NEAR_TIE
            ambiguous |= len(options) > 1 and options[1][0] < options[0][0] + NEAR_TIE
    if ambiguous:
        return
    ours, gradients = losses(case, normaliser, weights)
    expected, exact = losses(double(case), normaliser, weights, reference.detection_losses)
    assert list(ours) == list(expected)
    for name, value in expected.items():
        assert ours[name].dtype == torch.float32 and ours[name].shape == ()
        assert ours[name].item() == pytest.approx(value.item(), rel=1e-5), name
    assert all(close(*pair) for pair in zip(gradients, exact, strict=True))


@pytest.mark.parametrize("scale", [10.0, 50.0])
def test_large_logits_are_scored_as_exactly(scale):
    """With one query and one box no matching can differ."""
    case = make_case(0, [[1, 2], [1]], [[1], []], queries=1, scale=scale)
    ours, gradients = losses(case)
    expected, exact = losses(double(case), function=reference.detection_losses)
    assert all(ours[name].item() == pytest.approx(value.item(), rel=1e-5) for name, value in expected.items())
    assert all(close(*pair) for pair in zip(gradients, exact, strict=True))


def test_double_precision_stays_double():
    case = double(make_case(0, *MIXED))
    ours, gradients = losses(case)
    expected, exact = losses(case, function=reference.detection_losses)
    assert all(ours[name].item() == pytest.approx(value.item(), rel=1e-12) for name, value in expected.items())
    assert all(close(*pair, relative=1e-12) for pair in zip(gradients, exact, strict=True))


def transformers_losses(case: Case) -> tuple[dict, tuple[Tensor, Tensor]]:
    """Its class, box and GIoU losses of the last set, unweighted, and the gradients of their weighted sum."""
    config = SimpleNamespace(class_cost=1, bbox_cost=5, giou_cost=2, focal_alpha=0.25, two_stage=False)
    config.bbox_loss_coefficient, config.giou_loss_coefficient, config.auxiliary_loss = 5, 2, False
    labels = [
        {"class_labels": classes, "boxes": boxes[:count]}
        for classes, boxes, count in zip(case.labels, case.targets.boxes, case.targets.counts, strict=True)
    ]
    logits, boxes = case.logits[-1].detach().requires_grad_(), case.boxes[-1].detach().requires_grad_()
    maps = tuple(spans.float() for spans in case.label_maps)
    loss, terms, _ = GroundingDinoForObjectDetectionLoss(
        logits, labels, "cpu", boxes, config, maps, case.text_mask[:, None].expand_as(logits)
    )
    return terms, torch.autograd.grad(loss, (logits, boxes))


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_images_of_one_prompt_agree_with_transformers(seed, images):
    case = make_case(seed, [[1, 3, 2]] * images, [[0, 2, 2], [1], [0, 1]][:images], queries=6)
    ours, gradients = losses(case, sum(case.targets.counts))
    theirs, exact = transformers_losses(case)
    assert ours["class"].item() == pytest.approx(2 * theirs["loss_ce"].item(), rel=1e-5)
    assert ours["box"].item() == pytest.approx(5 * theirs["loss_bbox"].item(), rel=1e-5)
    assert ours["giou"].item() == pytest.approx(2 * theirs["loss_giou"].item(), rel=1e-5)
    assert all(close(ours[-1], other) for ours, other in zip(gradients, exact, strict=True))


def pulled_up(case: Case) -> list[list[list[int]]]:
    """For each image and each set, the columns where the class term asks for a higher logit."""
    _, (gradient, _) = losses(case)
    return [[sorted(set(rows.nonzero()[:, 1].tolist())) for rows in image] for image in (gradient < 0).transpose(0, 1)]


def test_each_image_is_judged_by_its_own_prompt():
    case = make_case(0, [[1, 1, 1], [1], [1, 1]], [[0], [0], [1]])
    assert pulled_up(case) == [[[1]] * 3, [[1]] * 3, [[3]] * 3]
    # What transformers cannot index: a prompt of one class, then label 2 of a prompt of three.
    assert pulled_up(make_case(0, [[1], [1, 1, 1]], [[0], [2]])) == [[[1]] * 3, [[5]] * 3]


@given(cases())
@settings(deadline=None, max_examples=40)
def test_micro_batches_add_up_to_the_batch(case):
    """Over one normaliser, that of the batch; images differ in prompt and number of boxes, down to none."""
    terms, gradients = losses(case)
    alone = [losses(case.image(b)) for b in range(len(case.text_mask))]
    for name, value in terms.items():
        assert value.item() == pytest.approx(sum(each[name].item() for each, _ in alone), rel=1e-5), name
    for gradient, *parts in zip(gradients, *(each for _, each in alone), strict=True):
        assert close(torch.cat(parts, 1), gradient)


@given(cases(), st.sampled_from([torch.float16, torch.bfloat16]))
@settings(deadline=None, max_examples=30)
def test_half_precision_is_computed_in_single(case, dtype):
    half = replace(case, logits=case.logits.to(dtype), boxes=case.boxes.to(dtype))
    terms, gradients = losses(half)
    expected, exact = losses(replace(case, logits=half.logits.float(), boxes=half.boxes.float()))
    assert all(terms[name].dtype == torch.float32 and torch.equal(terms[name], expected[name]) for name in expected)
    for gradient, other in zip(gradients, exact, strict=True):
        assert gradient.dtype == dtype and torch.equal(gradient, other.to(dtype))


@given(cases(), st.sampled_from([-torch.inf, torch.inf, torch.nan, 1e4]))
@settings(deadline=None, max_examples=30)
def test_padding_of_prompts_and_of_boxes_changes_nothing(case, noise):
    padding = ~case.text_mask[None, :, None].expand_as(case.logits)
    padded = torch.arange(case.targets.boxes.shape[1]) >= torch.tensor(case.targets.counts)[:, None]
    # A column that is not a number is no query to be matched: only the loss itself is safe from it.
    logits = case.logits.masked_fill(padding, 1e4 if noise != noise else noise)
    targets = replace(
        case.targets,
        boxes=case.targets.boxes.masked_fill(padded[..., None], noise),
        tokens=case.targets.tokens | (padded[..., None] & case.text_mask[:, None]),
    )
    expected, (by_logits, by_boxes) = losses(case)
    terms, gradients = losses(replace(case, logits=logits, targets=targets))
    assert all(torch.equal(terms[name], expected[name]) for name in expected)
    assert torch.equal(gradients[0], by_logits) and torch.equal(gradients[1], by_boxes)
    assert not gradients[0][padding].any()


@pytest.mark.parametrize("labels", [[[]], [[], []], [[], [], [1, 0]]], ids=str)
@pytest.mark.parametrize("rows", [0, 2])
def test_images_without_boxes_teach_what_is_not_there(labels, rows):
    case = make_case(0, [[1, 2]] * len(labels), labels)
    if not any(labels):  # a batch without any box may still come with rows of padding
        shape = case.targets.tokens.shape
        empty = Targets(torch.zeros(shape[0], rows, 4), torch.zeros(shape[0], rows, shape[2]).bool(), (0,) * shape[0])
        case = replace(case, targets=empty)
    terms, (by_logits, by_boxes) = losses(case)
    empty = [b for b, classes in enumerate(labels) if not classes]
    valid = case.text_mask[empty][None, :, None].expand_as(by_logits[:, empty])
    assert all(value > 0 for name, value in terms.items() if name.startswith("class"))
    assert any(labels) or all(value == 0 for name, value in terms.items() if not name.startswith("class"))
    assert (by_logits[:, empty][valid] > 0).all() and not by_boxes[:, empty].any()
    assert by_logits.isfinite().all() and by_boxes.isfinite().all()


@pytest.mark.parametrize("layers", [1, 2, 6])
def test_three_terms_for_the_encoder_and_for_every_decoder_layer(layers):
    terms, _ = losses(make_case(0, *MIXED, sets=1 + layers))
    names = ["_enc", *(f"_{layer}" for layer in range(layers - 1)), ""]
    assert list(terms) == [term + name for name in names for term in ("class", "box", "giou")]
    assert len(terms) == 3 * (1 + (layers - 1) + 1)


def test_sets_do_not_touch_one_another():
    case = make_case(0, *MIXED, sets=4)
    terms, _ = losses(case)
    for s, name in enumerate(["_enc", "_0", "_1", ""]):
        others = torch.arange(4) != s
        other = replace(case, logits=case.logits.clone(), boxes=case.boxes.clone())
        other.logits[others], other.boxes[others] = case.logits.flip(2)[others] + 1, case.boxes.flip(0)[others]
        assert all(torch.equal(losses(other)[0][term + name], terms[term + name]) for term in ("class", "box", "giou"))


def test_weights_of_the_loss_scale_its_terms():
    case = make_case(0, *MIXED)
    plain, _ = losses(case, weights=Weights(loss=(1.0, 1.0, 1.0)))
    for weights in (DEFAULT, Weights(loss=(0.0, 7.0, 0.1))):
        by_term = dict(zip(("class", "box", "giou"), weights.loss, strict=True))
        for name, value in losses(case, weights=weights)[0].items():
            assert value.item() == pytest.approx(by_term[name.split("_")[0]] * plain[name].item(), rel=1e-6), name
    assert (DEFAULT.loss, DEFAULT.cost, DEFAULT.alpha) == ((2, 5, 2), (1, 5, 2), 0.25)


def test_weights_of_the_matching_decide_who_is_matched():
    case = make_case(0, [[1]], [[0]], sets=2, queries=3)
    true = case.targets.boxes[0, 0]
    boxes = true.repeat(2, 1, 3, 1)
    boxes[..., 0, 2:] *= 0.1  # right in its centre
    boxes[..., 1, :2] += 0.6 * true[2:]  # right in its size: nearer in L1, and it overlaps less
    boxes[..., 2, :] = torch.tensor([0.95, 0.95, 0.05, 0.05])  # right in its class
    logits = torch.full_like(case.logits, -4.0)
    logits[..., 2, 1] = 4.0
    for cost, chosen in (((0, 1, 0), None), ((0, 0, 1), None), ((1, 0, 0), 2), ((1, 0.01, 0.01), 2)):
        weights = Weights(cost=cost)
        _, query, _ = match(logits, boxes, case.targets, weights)
        best = reference.image_matchings(logits[0], boxes[0], case.targets, weights, 0)[0][1][0][0]
        assert query.tolist() == [[best]] * 2 and chosen in (None, best)


@given(cases(), st.integers(0, 2**32 - 1), st.sampled_from(["logits", "boxes"]))
@settings(deadline=None, max_examples=60)
def test_what_is_not_finite_does_not_end_the_matching(case, seed, where):
    """Such a query is matched only where no other is left, and images without any are matched as before."""
    rng = np.random.default_rng(seed)
    values = getattr(case, where).clone()
    poisoned = torch.from_numpy(rng.random(values.shape[:3]) < rng.choice([0.1, 0.5, 1.0]))
    poisoned[:, rng.random(len(case.text_mask)) < 0.3] = False
    values[poisoned] = torch.nan if where == "logits" else float(rng.choice([torch.nan, torch.inf, -torch.inf]))
    bad = replace(case, **{where: values})
    image, query, box = match(bad.logits, bad.boxes, bad.targets, DEFAULT)
    _, before, box_before = match(case.logits, case.boxes, case.targets, DEFAULT)
    for s in range(len(values)):
        for b, count in enumerate(case.targets.counts):
            queries, boxes = query[s, image[s] == b], box[s, image[s] == b]
            assert len(queries) == min(values.shape[2], count) == len(queries.unique()) == len(boxes.unique())
            assert poisoned[s, b, queries].sum() == max(0, len(queries) - int((~poisoned[s, b]).sum()))
            if not poisoned[s, b].any():
                assert torch.equal(queries, before[s, image[s] == b])
                assert torch.equal(boxes, box_before[s, image[s] == b])
    losses(bad)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_infinite_logits_do_not_end_the_matching(value):
    case = make_case(0, *MIXED)
    losses(replace(case, logits=torch.full_like(case.logits, value)))


def test_equal_predictions_are_matched_somehow():
    case = make_case(0, *MIXED)
    equal = replace(case, logits=torch.zeros_like(case.logits), boxes=case.boxes[:, :, :1].expand_as(case.boxes))
    _, query, _ = match(equal.logits, equal.boxes, equal.targets, DEFAULT)
    assert [len(set(row)) for row in query[:, :2].tolist()] == [2] * 3
    terms, _ = losses(equal)
    for name, value in losses(double(equal), function=reference.detection_losses)[0].items():
        assert terms[name].item() == pytest.approx(value.item(), rel=1e-5), name


def test_a_perfect_answer_costs_nothing_but_certainty():
    case = make_case(0, *MIXED)
    boxes, logits = case.boxes.clone(), torch.full_like(case.logits, -12.0)
    for b, count in enumerate(case.targets.counts):
        boxes[:, b, :count] = case.targets.boxes[b, :count]
        logits[:, b, :count] = torch.where(case.targets.tokens[b, :count], 12.0, -12.0)
    terms, _ = losses(replace(case, logits=logits, boxes=boxes))
    assert all(abs(value) < 1e-5 for value in terms.values())
