"""Run existing programs on these operators.

`kda_ops.compat.fla` offers FLA's functions; `kda_ops.compat.transformers` patches transformers.
"""
