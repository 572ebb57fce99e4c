"""Calibration against scikit-learn's own distances, and its way to a file and back."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.covariance import LedoitWolf

from gdino_lab.metrics.calibration import Calibration


@pytest.fixture
def columns():
    rng = np.random.default_rng(0)

    def draw(count: int, shift: float = 0.0) -> dict[str, np.ndarray]:
        return {"local": rng.normal(3 + shift, 2, count), "features": rng.normal(shift, 1, (count, 5))}

    return draw(40), draw(30), draw(20, 2.0)


def test_features_become_scikit_learns_mahalanobis_distance(columns):
    train, held_out, new = columns
    found = Calibration.fit(train, held_out, ("local", "features"))
    expected = np.sqrt(LedoitWolf().fit(train["features"]).mahalanobis(new["features"]))
    np.testing.assert_allclose(found.distance("features", new["features"]), expected, rtol=1e-9)
    np.testing.assert_array_equal(found.distance("local", new["local"]), new["local"])


def test_scores_are_standard_deviations_of_images_held_out(columns):
    train, held_out, new = columns
    calibration = Calibration.fit(train, held_out, ("local", "features"))
    calm = calibration.scores(held_out)
    for name in ("local", "features"):
        assert abs(calm[name].mean()) < 1e-9 and calm[name].std() == pytest.approx(1)
    np.testing.assert_allclose(calm["score"], calm["local"] + calm["features"])
    assert calibration.highest == calm["score"].max()
    assert calibration.scores(new)["score"].mean() > 2


def test_arrays_there_and_back(columns):
    train, held_out, new = columns
    calibration = Calibration.fit(train, held_out, ("features",))
    again = Calibration.from_arrays(calibration.arrays(), ("features",))
    assert again.highest == calibration.highest
    np.testing.assert_array_equal(again.scores(new)["score"], calibration.scores(new)["score"])


def test_constant_scores_divide_by_no_zero():
    same = {"local": np.ones(4)}
    assert np.isfinite(Calibration.fit(same, same, ("local",)).scores(same)["score"]).all()
