"""Prefect tasks, one module a step: names, retries and artifacts; the work is in infra/."""

from tasks.cleanup import cleanup_after_publishing, cleanup_before_training
from tasks.convention import convention
from tasks.disk import watch_disk
from tasks.evaluation import evaluate
from tasks.extract import engine_may_load, extract, extraction_is_due, verify
from tasks.generate import generate
from tasks.gpus import gpu_slot, gpus_of, ready_gpus
from tasks.parity import fit_for_parity, parity, parity_is_due, parity_side, parity_verdict
from tasks.planning import plan
from tasks.preflight import preflight
from tasks.prepare import prepare, samples_are_whole
from tasks.presence import ends_with_its_run
from tasks.publish import publish
from tasks.reporting import assemble, finished_report, report
from tasks.serve import begin_loading
from tasks.train import states_are_needed, train

__all__ = [
    "assemble",
    "begin_loading",
    "cleanup_after_publishing",
    "cleanup_before_training",
    "convention",
    "ends_with_its_run",
    "engine_may_load",
    "evaluate",
    "extract",
    "extraction_is_due",
    "finished_report",
    "fit_for_parity",
    "generate",
    "gpu_slot",
    "gpus_of",
    "parity",
    "parity_is_due",
    "parity_side",
    "parity_verdict",
    "plan",
    "preflight",
    "prepare",
    "publish",
    "ready_gpus",
    "report",
    "samples_are_whole",
    "states_are_needed",
    "train",
    "verify",
    "watch_disk",
]
