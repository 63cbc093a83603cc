"""Tuning tasks: one fused kernel each, extracted from lowered modules."""
