"""Run existing programs on these operators.

`kda_ops.compat.fla` offers FLA's functions; `kda_ops.compat.fla_backend` puts the operators under
FLA's own. `kda_ops.compat.transformers` patches transformers; `kda_ops.compat.hub_layers` holds the
layers of the kernel for the Hugging Face hub. `kda_ops.compat.vllm` and `kda_ops.compat.sglang` put
the operators under the functions of serving engines.
"""
