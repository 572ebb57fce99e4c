"""What is normal in one category, learnt from normal images: turns raw anomaly scores into comparable numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from sklearn.covariance import LedoitWolf

Columns = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Calibration:
    """Raw columns are (N,) scores, or (N, d) features that become a distance from normal ones.

    normal: for each feature column its mean (d,) and precision (d, d).
    scale: for each column the mean and standard deviation (2,) of its score on normal images held out.
    summed: the columns that make up the score of an image, each scaled, with equal weights.
    highest: the largest score of a normal image held out.
    """

    normal: dict[str, tuple[np.ndarray, np.ndarray]]
    scale: dict[str, np.ndarray]
    summed: tuple[str, ...]
    highest: float

    @classmethod
    def fit(cls, train: Columns, held_out: Columns, summed: tuple[str, ...]) -> Calibration:
        """Features after Ledoit & Wolf (2004) on `train`, scales on `held_out`, both of normal images."""
        normal = {}
        for name, column in train.items():
            if column.ndim == 2:
                fitted = LedoitWolf().fit(column.astype(np.float64))
                normal[name] = (fitted.location_, fitted.get_precision())
        bare = cls(normal, {}, summed, 0.0)
        distances = {name: bare.distance(name, column) for name, column in held_out.items()}
        scale = {name: np.array([score.mean(), score.std() + 1e-12]) for name, score in distances.items()}
        scaled = cls(normal, scale, summed, 0.0)
        return cls(normal, scale, summed, float(scaled.scores(held_out)["score"].max()))

    def distance(self, name: str, column: np.ndarray) -> np.ndarray:
        """(N,) fp64: a score as it is; of features the Mahalanobis distance."""
        column = column.astype(np.float64)
        if name not in self.normal:
            return column
        mean, precision = self.normal[name]
        centred = column - mean
        return np.sqrt(np.maximum(((centred @ precision) * centred).sum(1), 0.0))

    def scores(self, columns: Columns) -> dict[str, np.ndarray]:
        """(N,) each: every column in standard deviations of normal images, and their sum as "score"."""
        scaled = {
            name: (self.distance(name, column) - self.scale[name][0]) / self.scale[name][1]
            for name, column in columns.items()
        }
        return scaled | {"score": sum(scaled[name] for name in self.summed)}

    def arrays(self) -> dict[str, np.ndarray]:
        """All of it, to be stored; the inverse of `from_arrays`."""
        flat = {f"normal/{name}/{part}": array for name, pair in self.normal.items() for part, array in zip("mp", pair)}
        flat |= {f"scale/{name}": array for name, array in self.scale.items()}
        return flat | {"highest": np.array([self.highest])}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], summed: tuple[str, ...]) -> Calibration:
        def below(prefix: str) -> list[str]:
            return [key.split("/")[1] for key in arrays if key.startswith(prefix)]

        return cls(
            {name: (arrays[f"normal/{name}/m"], arrays[f"normal/{name}/p"]) for name in dict.fromkeys(below("normal/"))},
            {name: arrays[f"scale/{name}"] for name in below("scale/")},
            summed,
            float(arrays["highest"][0]),
        )
