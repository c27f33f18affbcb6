"""Tools of a developer: the offline compiler, digests of kernels, tuning, and a timer."""
