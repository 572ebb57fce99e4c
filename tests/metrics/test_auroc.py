"""AUROC against scikit-learn's for scores of any range, the protocol's four numbers, and the error bar."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from gdino_lab.metrics.auroc import auroc, loco_auroc, standard_error

ranges = st.one_of(
    st.floats(-1e6, 1e6),
    st.floats(0, 1),
    st.floats(-1e-9, 1e-9),
    st.integers(-3, 3).map(float),  # ties
    st.sampled_from([20.0, 25.0, 30.0, 40.0]),
)
groups = st.lists(ranges, min_size=1, max_size=30).map(np.array)


def by_sklearn(normal, anomalous) -> float:
    labels = np.r_[np.zeros(len(normal)), np.ones(len(anomalous))]
    return roc_auc_score(labels, np.r_[normal, anomalous])


@given(groups, groups)
@settings(deadline=None, max_examples=200)
def test_it_is_scikit_learns(normal, anomalous):
    ours = auroc(normal, anomalous)
    assert isinstance(ours, float)
    assert ours == pytest.approx(by_sklearn(normal, anomalous), abs=1e-9)
    assert ours + auroc(anomalous, normal) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    ("normal", "anomalous", "expected"),
    [
        ([20, 25], [30, 40], 1.0),  # a sigmoid would make ties of these
        ([30, 40], [20, 25], 0.0),
        ([-40, -30], [-25, -20], 1.0),
        ([1, 1, 1], [1, 1], 0.5),
        ([0.0], [0.0], 0.5),
        ([1, 2], [2, 3], 0.875),
        ([1e-300, 2e-300], [3e-300, 4e-300], 1.0),
        ([-np.inf, 0], [np.inf], 1.0),
    ],
)
def test_known_values(normal, anomalous, expected):
    assert auroc(np.array(normal), np.array(anomalous)) == expected


def test_single_precision_scores_are_ranked_as_they_are():
    normal, anomalous = np.float32([0.1, 0.2]), np.float32([0.1, 0.3])
    assert auroc(normal, anomalous) == by_sklearn(normal, anomalous) == 0.625


def test_one_class_is_undefined():
    some, none = np.array([0.1, 0.2]), np.array([])
    assert auroc(some, none) is None and auroc(none, some) is None and auroc(none, none) is None
    assert loco_auroc(some, none, none) == dict.fromkeys(("logical", "structural", "mean", "pooled"))
    assert loco_auroc(some, some, none) == {"logical": 0.5, "structural": None, "mean": None, "pooled": 0.5}


@given(groups, groups, groups)
@settings(deadline=None, max_examples=80)
def test_the_four_numbers_of_the_protocol(good, logical, structural):
    found = loco_auroc(good, logical, structural)
    assert list(found) == ["logical", "structural", "mean", "pooled"]
    assert found["logical"] == pytest.approx(by_sklearn(good, logical), abs=1e-9)
    assert found["structural"] == pytest.approx(by_sklearn(good, structural), abs=1e-9)
    assert found["mean"] == pytest.approx((found["logical"] + found["structural"]) / 2, abs=1e-12)
    share = len(logical) / (len(logical) + len(structural))
    weighted = share * found["logical"] + (1 - share) * found["structural"]
    assert found["pooled"] == pytest.approx(weighted, abs=1e-9)
    assert found["pooled"] == pytest.approx(by_sklearn(good, np.r_[logical, structural]), abs=1e-9)


@pytest.fixture(scope="module")
def scores() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(centre, 1, size) for centre, size in ((0.0, 60), (0.6, 50), (1.2, 40))]


def plain_bootstrap(scorings, draws: int = 500) -> float:
    rng = np.random.default_rng(99)
    found = []
    for _ in range(draws):
        chosen = [rng.integers(0, len(group), len(group)) for group in scorings[0]]
        means = []
        for scoring in scorings:
            good, *others = (group[index] for group, index in zip(scoring, chosen, strict=True))
            means.append(np.mean([(good[None] < other[:, None]).mean() for other in others]))
        found.append(means[0] - (means[1] if len(means) > 1 else 0))
    return float(np.std(found, ddof=1))


def test_the_error_is_that_of_a_plain_bootstrap(scores):
    # Each of the two is off by 1 / sqrt(2 * 500) = 3 % at one sigma.
    assert standard_error(scores) == pytest.approx(plain_bootstrap([scores]), rel=0.15)


def test_the_paired_error_is_that_of_a_plain_paired_bootstrap(scores):
    rng = np.random.default_rng(1)
    other = [group + rng.normal(0, 0.4, len(group)) for group in scores]
    paired = standard_error(scores, other)
    assert paired == pytest.approx(plain_bootstrap([scores, other]), rel=0.15)
    assert paired < 0.8 * standard_error(scores)  # pairing takes out what both have in common


@pytest.fixture
def few(monkeypatch):
    """Fewer bootstrap draws, where how exact the error is does not matter."""
    monkeypatch.setattr("gdino_lab.metrics.auroc.RESAMPLES", 40)


def test_a_scoring_does_not_differ_from_itself(scores, few):
    assert standard_error(scores, [group.copy() for group in scores]) == 0
    assert standard_error(scores, [3 * group + 100 for group in scores]) == 0  # the same order is the same AUROC


def test_lists_and_repetition(scores, few):
    as_lists = [group.tolist() for group in scores]
    assert standard_error(as_lists) == standard_error(scores) == standard_error(scores, seed=0)
    assert standard_error(scores) != standard_error(scores, seed=1)


def test_perfect_scores_have_no_error(few):
    assert standard_error([[0.0, 1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]) == 0


@pytest.mark.parametrize("sizes", [(1, 3, 3), (3, 1, 3), (3, 3, 1), (1, 1, 1)], ids=str)
def test_a_kind_with_a_single_image_has_an_error_too(sizes, few):
    """A split may hold one image: drawing again from it gives it again."""
    rng = np.random.default_rng(2)
    error = standard_error([rng.normal(size=size) for size in sizes])
    assert np.isfinite(error) and error >= 0
