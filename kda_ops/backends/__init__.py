"""The backends: each implements the stages of `kda_ops.stages`."""
