"""Times and memory of the inside algorithm, forward and backward, beside two readable baselines."""
