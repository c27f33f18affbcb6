"""Device functions and structures that kernels of several stages share."""
