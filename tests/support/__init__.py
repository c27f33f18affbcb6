"""Helpers of every suite: cases as data (`cases`), calls (`calls`), budgets (`closeness`), devices
(`target`).
"""
