"""What ONNX Runtime makes ready for the comparison and the validation of a model, while TVM compiles it.

ONNX Runtime takes long to load a model, on one core: a third of what follows the search of a large encoder. So it loads
in a thread of its own. Nothing is timed before that thread is done.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from relaxtune.models.axis_profile import sizes_within
from relaxtune.pipeline.artifact.export import policy_of
from relaxtune.pipeline.bench.measure import Peers
from relaxtune.pipeline.choose.shipping import find_peers
from relaxtune.pipeline.prepare import PreparedModel, stage
from relaxtune.pipeline.tvm_runtime.threads import default_threads
from relaxtune.pipeline.validate.reference import Reference
from relaxtune.pipeline.validate.validation import sample_inputs


@dataclass(frozen=True)
class Meanwhile:
    """What ONNX Runtime makes ready while something else compiles; each answer waits for it."""

    _peers: Future[Peers]
    _reference: Future[Reference | None]

    def peers(self) -> Peers:
        """Return the peers to be timed; nothing of ONNX Runtime runs beside them any more."""
        self.reference()
        return self._peers.result()

    def reference(self) -> Reference | None:
        """Return the reference that has computed the samples; None where none is needed."""
        return self._reference.result()


@contextmanager
def meanwhile(
    prepared: PreparedModel, *, benchmark: bool, samples: int, reference: Reference | None
) -> Iterator[Meanwhile]:
    """Give what ONNX Runtime loads and computes while the context's body goes on.

    `benchmark`: whether the model is timed, beside a peer. `samples`: random inputs that the artifact is validated
    with. `reference`: of `make_reference`, where it was made already.
    """
    threads = default_threads()
    pool = ThreadPoolExecutor(1, "onnxruntime")

    try:
        peers = pool.submit(lambda: find_peers(prepared, threads) if benchmark else Peers())
        yield Meanwhile(peers, pool.submit(lambda: reference or make_reference(prepared, samples)))
    finally:
        pool.shutdown(cancel_futures=True)


def make_reference(prepared: PreparedModel, samples: int, threads: int | None = None) -> Reference | None:
    """Return the reference that has computed the samples that the artifact is validated with; None without any."""
    if not samples or prepared.buckets:
        return None
    with stage("reference"):
        reference = Reference(prepared.model, threads, policy=policy_of(prepared.lowered))
        sizes = sizes_within(prepared.model, prepared.lowered.options.maxima)
        reference.remember(sample_inputs(prepared.model, samples=samples, seed=0, dims=sizes))
    return reference
