"""Record what a pass launches, and replay it (docs/kernels/design.md, launch plans)."""
