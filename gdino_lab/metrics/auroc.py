"""Image AUROC by the MVTec LOCO protocol, from scores of any range, with its error bar."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import mannwhitneyu

RESAMPLES = 2000


def auroc(normal: np.ndarray, anomalous: np.ndarray) -> float | None:
    """Probability that an anomalous image scores above a normal one, ties counting half.

    It equals the area under the ROC curve exactly (Hanley & McNeil 1982) and needs no thresholds, so no squashing of
    scores into [0, 1]. None where one class is missing: undefined.
    """
    if len(normal) == 0 or len(anomalous) == 0:
        return None
    return float(mannwhitneyu(anomalous, normal, method="asymptotic").statistic / (len(normal) * len(anomalous)))


def loco_auroc(good: np.ndarray, logical: np.ndarray, structural: np.ndarray) -> dict[str, float | None]:
    """The protocol's numbers: good vs logical, good vs structural, their plain mean (the headline), and pooled (good
    vs all anomalies, which many repositories print instead)."""
    by_kind = [auroc(good, logical), auroc(good, structural)]
    return {
        "logical": by_kind[0],
        "structural": by_kind[1],
        "mean": None if None in by_kind else float(np.mean(by_kind)),
        "pooled": auroc(good, np.concatenate([logical, structural])),
    }


def standard_error(
    scores: Sequence[Sequence[float]], minus: Sequence[Sequence[float]] | None = None, seed: int = 0
) -> float:
    """Bootstrap standard error of the mean AUROC, or of the difference between two scorings of the same images.

    Args:
        scores: good, logical and structural scores; images are drawn again within each of the three.
        minus: another scoring of the same images, in the same order: the error of `scores` minus `minus`, paired.
    """
    rng = np.random.default_rng(seed)
    # How often each image is drawn in each resample, (RESAMPLES, images) by group.
    drawn = [rng.multinomial(len(group), np.full(len(group), 1 / len(group)), RESAMPLES) for group in scores]
    values = _resampled_mean(scores, drawn)
    if minus is not None:
        values = values - _resampled_mean(minus, drawn)
    return float(values.std(ddof=1))


def _resampled_mean(scores: Sequence[Sequence[float]], drawn: list[np.ndarray]) -> np.ndarray:
    """(RESAMPLES,) mean AUROCs: with the pairwise comparisons at hand, a resample is a weighted sum of them."""
    good, *anomalous = (np.asarray(group, dtype=np.float64) for group in scores)
    total = np.zeros(RESAMPLES)
    for group, weights in zip(anomalous, drawn[1:], strict=True):
        above = (group > good[:, None]) + 0.5 * (group == good[:, None])
        total += ((drawn[0] @ above) * weights).sum(1) / (len(good) * len(group))
    return total / len(anomalous)
