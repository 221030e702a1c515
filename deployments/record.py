"""What ``run_dir`` remembers of the Prefect server and worker."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from deployments.environment import api_url
from deployments.profile import Earlier
from infra.config.settings import Settings
from infra.errors import ProcessFailed
from infra.machine.detached import Detached, this_process


class StackRecord(BaseModel):
    """A server and a worker that were started together.

    ``mode`` says for whom: ``up`` for daily use, ``round`` for the one run of the command ``owner``.
    """

    mode: Literal["up", "round"]
    port: int
    server: Detached
    worker: Detached
    owner: Detached
    started_at: datetime
    earlier: Earlier | None = None

    @property
    def api(self) -> str:
        """Address of the server's API."""
        return api_url(self.port)

    @property
    def alive(self) -> bool:
        """Whether server and worker both run."""
        return self.server.alive and self.worker.alive

    def stop(self) -> None:
        """End whatever of it still runs."""
        self.worker.stop()
        self.server.stop()


def read_record(settings: Settings) -> StackRecord | None:
    """The stack that was started last, whether or not it still runs; None if it was stopped properly.

    Raises:
        ProcessFailed: the record is damaged.
    """
    file = _file(settings)
    try:
        return StackRecord.model_validate_json(file.read_bytes()) if file.is_file() else None
    except ValidationError as error:
        raise ProcessFailed(
            f"the record of the Prefect server and worker, {file}, is damaged",
            expected="what `eagle3 up` wrote",
            fix="end the server and worker if they still run (`ps -ef | grep prefect`), then delete it",
        ) from error


def running(settings: Settings) -> StackRecord | None:
    """The stack that runs now."""
    record = read_record(settings)
    return record if record is not None and record.alive else None


def write_record(
    settings: Settings, mode: Literal["up", "round"], port: int, pids: tuple[int, int], earlier: Earlier | None = None
) -> StackRecord:
    """Remember that server and worker (``pids``) now run."""
    server, worker = (Detached.of(pid) for pid in pids)
    record = StackRecord(
        mode=mode,
        port=port,
        server=server,
        worker=worker,
        owner=this_process(),
        started_at=datetime.now(UTC),
        earlier=earlier,
    )
    file = _file(settings)
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(".new")
    fresh.write_text(record.model_dump_json(indent=2))
    fresh.replace(file)
    return record


def forget(settings: Settings) -> None:
    """Nothing runs any more."""
    _file(settings).unlink(missing_ok=True)


def _file(settings: Settings) -> Path:
    return settings.run_dir / "stack" / "stack.json"
