"""Parts that passes share: readers of Relax IR, identities of expressions, the step and its state."""
