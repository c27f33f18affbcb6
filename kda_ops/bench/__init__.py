"""Measurements: our operators beside their peers (`compare`), evidence from a GPU, kernel
configurations (`tune`, `offline`).
"""
