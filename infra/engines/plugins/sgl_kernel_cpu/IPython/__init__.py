"""Stands in for IPython: SGLang imports its display functions for notebooks."""

from eagle3_absent import stand_in  # type: ignore[import-not-found]

stand_in(__name__)
