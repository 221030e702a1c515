"""Prefect tasks, one module a step: names, retries and artifacts; the work is in infra/."""

from tasks.cleanup import cleanup_after_publishing, cleanup_before_training
from tasks.evaluation import evaluate
from tasks.extract import extract, extraction_is_due, verify
from tasks.generate import generate
from tasks.planning import plan
from tasks.preflight import preflight
from tasks.prepare import prepare
from tasks.publish import publish
from tasks.reporting import assemble, finished_report, report
from tasks.serve import begin_loading
from tasks.train import states_are_needed, train

__all__ = [
    "assemble",
    "begin_loading",
    "cleanup_after_publishing",
    "cleanup_before_training",
    "evaluate",
    "extract",
    "extraction_is_due",
    "finished_report",
    "generate",
    "plan",
    "preflight",
    "prepare",
    "publish",
    "report",
    "states_are_needed",
    "train",
    "verify",
]
