"""The stages of the chunk forms and the operators of layers, each with its kernels."""
