"""The backends: sets of stage functions with the contracts of `kda_ops.stages`."""
