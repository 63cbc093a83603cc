"""MetaSchedule's XGBoost cost model, trained without its detours.

The stock model evaluates two metrics in Python after each of several hundred boosting rounds, and gives a training set
of a few hundred rows all cores: on 2 cores it takes 2 to 9 seconds to learn from 16 candidates. This one boosts a fixed
number of rounds on one thread, in well under a second, on the same features and with the same objective.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms
from tvm.s_tir.meta_schedule.cost_model.xgb_model import FeatureGroup, PackSum
from tvm.s_tir.meta_schedule.utils import shash2hex

if TYPE_CHECKING:
    import xgboost as xgb

# At the stock learning rate of 0.2 the training error has settled by then.
_BOOST_ROUNDS = 80
# Candidates of one task that the model remembers at most, their features being 10 kB each; beyond that, half are left.
_CANDIDATES_MAX = 1024
# Predictions are random until the model has learnt from so many candidates.
WARMUP_CANDIDATES = 32


@derived_object
class FastCostModel(ms.cost_model.XGBModel._cls):  # type: ignore[misc]
    """An XGBoost cost model; `update` and `predict` as MetaSchedule calls them.

    Predictions are random until it has learnt from `warmup_candidates`. The trees depend on `seed`.
    """

    def __init__(self, warmup_candidates: int, seed: int) -> None:
        config = ms.cost_model.xgb_model.XGBConfig(nthread=1, seed=seed % 2**31, tree_method="hist")
        super().__init__(config=config, num_warmup_samples=warmup_candidates, verbose_eval=0)
        self._seed = seed
        # Searches of several tasks share the model.
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()

    def update(
        self, context: ms.TuneContext, candidates: list[ms.MeasureCandidate], results: list[ms.runner.RunnerResult]
    ) -> None:
        """Learn from the results of some candidates of one task."""
        with self._lock:
            super().update(context, candidates, results)
            group = self.data.get(shash2hex(context.mod))
            if group is not None and len(group.features) > _CANDIDATES_MAX:
                # Half of them stay: the best quarter and the newest.
                count, quarter = len(group.features), _CANDIDATES_MAX // 4
                kept = sorted({*np.argsort(group.costs)[:quarter].tolist(), *range(count - quarter, count)})
                group.features = [group.features[row] for row in kept]
                group.costs = group.costs[kept]

    def predict(self, context: ms.TuneContext, candidates: list[ms.MeasureCandidate]) -> np.ndarray:
        """Return a score for each candidate, higher for a faster one; random ones before it has learnt anything.

        Random scores depend on the seed, the task and the number of earlier calls for it, and on no other task.
        """
        if self.data_size >= self.num_warmup_samples and self.booster is not None:
            return np.asarray(super().predict(context, candidates))
        key = shash2hex(context.mod)
        with self._lock:
            self._calls[key] += 1
            count = self._calls[key]
        return np.random.default_rng([self._seed % 2**31, int(key, 16), count]).uniform(size=len(candidates))

    def features_of(
        self, context: ms.TuneContext, candidates: Sequence[ms.MeasureCandidate]
    ) -> list[NDArray[np.float32]]:
        """Return what the model sees of some candidates of one module: a matrix (stores, features) of each."""
        found = self.extractor.extract_from(context, list(candidates))
        return [np.asarray(x.numpy(), dtype=np.float32) for x in found]

    def absorb(self, workload_hash: str, features: Sequence[NDArray[np.float32]], seconds: Sequence[float]) -> None:
        """Take in the features of candidates of one module with their latencies; `train` learns from them."""
        kept = [(x, s) for x, s in zip(features, seconds, strict=True) if len(x)]
        if not kept:
            return
        rows, costs = [x for x, _ in kept], np.array([s for _, s in kept], dtype="float32")
        # As MetaSchedule writes the same hash.
        key = hex(int(workload_hash))
        if key in self.data:
            self.data[key].append(rows, costs)
        else:
            self.data[key] = FeatureGroup(group_hash=key, features=rows, costs=costs)
        self.data_size += len(rows)

    def train(self) -> None:
        """Learn from all that was taken in."""
        self.last_train_size = self.data_size
        groups = list(self.data.values())
        features = [x for group in groups for x in group.features]
        self._train(features, np.concatenate([group.min_cost / group.costs for group in groups]))

    def _train(self, xs: list[np.ndarray], ys: np.ndarray) -> None:
        # Half a second, with SciPy's sparse matrices: most commands, and runs of few candidates, never learn.
        import xgboost as xgb

        packed = PackSum(xs=xs, ys=ys)

        def objective(predicted: np.ndarray, _data: xgb.DMatrix) -> tuple[np.ndarray, np.ndarray]:
            gradient, hessian = packed.obj_square_error(predicted)
            return gradient, hessian

        self.booster = xgb.train(self.config.to_dict(), packed.dmatrix, num_boost_round=_BOOST_ROUNDS, obj=objective)
