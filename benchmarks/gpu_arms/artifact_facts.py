"""What an artifact is made of, for results and progress."""

from __future__ import annotations

from collections import Counter

from relaxtune.pipeline.artifact.manifest import Manifest


def describe(manifest: Manifest) -> dict[str, object]:
    """Return what an artifact is made of: kernel launches, launches by route, kernels without a record."""
    routes: Counter[str] = Counter()
    for kernel in manifest.kernels:
        routes[kernel.route] += kernel.calls
    validation = manifest.validation
    return {
        "launches": sum(kernel.calls for kernel in manifest.kernels),
        "launches_by_route": dict(routes),
        "kernels_without_record": sum(kernel.record_id is None for kernel in manifest.kernels),
        "precision": manifest.precision,
        "cuda_graph": manifest.target.cuda_graph,
        "validated_when_made": validation["passed"] if validation else None,
        "versions": dict(manifest.versions),
    }
