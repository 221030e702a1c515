"""Prefect tasks, one module a step: names, retries and artifacts; the work is in infra/."""

from tasks.convention import convention
from tasks.disk import watch_disk
from tasks.evaluation import evaluate
from tasks.extract import extract, verify
from tasks.generate import generate
from tasks.gpus import gpu_slot, gpus_of, ready_gpus
from tasks.logs import show_logs_of_infra
from tasks.parity import fit_for_parity, parity, parity_side, parity_verdict
from tasks.planning import plan
from tasks.preflight import preflight
from tasks.prepare import prepare
from tasks.presence import ends_with_its_run
from tasks.publish import cleanup_after_publishing, cleanup_before_training, publish, report, report_again
from tasks.train import train

__all__ = [
    "cleanup_after_publishing",
    "cleanup_before_training",
    "convention",
    "ends_with_its_run",
    "evaluate",
    "extract",
    "fit_for_parity",
    "generate",
    "gpu_slot",
    "gpus_of",
    "parity",
    "parity_side",
    "parity_verdict",
    "plan",
    "preflight",
    "prepare",
    "publish",
    "ready_gpus",
    "report",
    "report_again",
    "train",
    "verify",
    "watch_disk",
]

show_logs_of_infra()
