"""Drop-ins for programs that exist already: `kda_ops.compat.fla` has FLA's function names,
`kda_ops.compat.transformers` goes under models of transformers.
"""
