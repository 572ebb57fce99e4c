"""Image AUROC by the MVTec LOCO protocol, from scores of any range, with its error bar."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import bootstrap, mannwhitneyu

RESAMPLES = 500


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

    scorings = [[np.asarray(group) for group in each] for each in (scores, minus) if each is not None]

    def statistic(*chosen: np.ndarray) -> float:
        first, *second = (
            loco_auroc(*(group[index] for group, index in zip(scoring, chosen, strict=True)))["mean"]
            for scoring in scorings
        )
        return first - second[0] if second else first

    result = bootstrap(
        [np.arange(len(group)) for group in scores],
        statistic,
        n_resamples=RESAMPLES,
        vectorized=False,
        method="percentile",
        rng=np.random.default_rng(seed),
    )
    return float(result.standard_error)
