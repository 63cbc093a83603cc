"""Precision policies: what weights, activations and sums are held in, chosen by name."""

from relaxtune.pipeline.precision.policy import DEFAULT_GROUP_SIZE, POLICY_NAMES, PrecisionPolicy, named_policy

__all__ = ["DEFAULT_GROUP_SIZE", "POLICY_NAMES", "PrecisionPolicy", "named_policy"]
