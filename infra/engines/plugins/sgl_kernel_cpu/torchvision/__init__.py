"""Stands in for torchvision, which has no release for this torch on a package index."""

from eagle3_absent import stand_in  # type: ignore[import-not-found]

stand_in(__name__)
