"""Measure our operators next to their peers; not part of the wheel."""
