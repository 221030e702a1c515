"""Stands in for triton (1 GB): SGLang defines kernels in it wherever it runs, and asks its driver for a GPU."""

from eagle3_absent import stand_in  # type: ignore[import-not-found]

stand_in(__name__, empty=("triton.runtime.driver",))
