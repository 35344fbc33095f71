"""Long series as few points: mean, minimum and maximum of each bin of neighbouring steps."""

from dataclasses import dataclass

import numpy as np

POINTS = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """Partition of a series' rows into bins, one point each."""

    starts: np.ndarray  # [B] int64: the first row of each bin
    num_rows: int

    @property
    def rows_per_point(self) -> int:
        """Rows of the largest bin; 1 without thinning."""
        return int(np.diff(np.append(self.starts, self.num_rows)).max(initial=1))

    @property
    def is_thinned(self) -> bool:
        return self.rows_per_point > 1

    def means(self, values: np.ndarray) -> np.ndarray:
        """[rows] or [rows, K] to [B] or [B, K]: mean of the finite values in each bin; nan without any."""
        there = np.isfinite(values)
        if not len(values):
            return values.astype(float)
        sums = np.add.reduceat(np.where(there, values, 0.0), self.starts, axis=0)
        counts = np.add.reduceat(there.astype(float), self.starts, axis=0)
        return np.divide(sums, counts, out=np.full(sums.shape, np.nan), where=counts > 0)

    def least(self, values: np.ndarray) -> np.ndarray:
        return self._extreme(np.fmin, values)

    def most(self, values: np.ndarray) -> np.ndarray:
        return self._extreme(np.fmax, values)

    def last(self, values: np.ndarray) -> np.ndarray:
        """Return the last row of each bin."""
        return values[np.append(self.starts[1:], self.num_rows) - 1] if self.num_rows else values

    def _extreme(self, which: np.ufunc, values: np.ndarray) -> np.ndarray:
        return which.reduceat(values.astype(float), self.starts, axis=0) if len(values) else values.astype(float)


def bins_of(num_rows: int, points: int = POINTS) -> Bins:
    """Return at most `points` bins of nearly equal size."""
    starts = np.unique(np.arange(min(num_rows, points)) * num_rows // max(1, min(num_rows, points)))
    return Bins(starts=starts.astype(np.int64), num_rows=num_rows)
