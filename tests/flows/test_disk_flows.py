"""The clean-up flow, and what Prefect and the report are told when a round waits for disk."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from standin.machine import Machine, Use
from standin.small_disk import fill, small_disk
from standin.standing import Standing
from standin.stored_round import finish

import tasks
from flows.cleanup import cleanup
from infra.config.settings import Settings
from infra.round.ledger import Ledger
from infra.store.objects import ObjectStore

pytestmark = pytest.mark.usefixtures("api")


async def tables(key: str) -> list[Any]:
    async with get_client() as client:
        found = [item for item in await client.read_artifacts() if item.key == key]
        return [item.data for item in sorted(found, key=lambda item: str(item.created))]


def test_the_clean_up_lists_first_and_deletes_when_asked(tmp_path: Path, use: Use) -> None:
    use(Machine(tmp_path, {}))
    settings = Settings()
    store = ObjectStore(settings.store)
    finish(store, "smoke")
    finish(store, "nobody-knows")
    torn = settings.state_dir / "store" / "rounds" / ".put-0123456789abcdef"
    torn.write_bytes(bytes(5000))
    os.utime(torn, (0, 0))
    staged = settings.scratch_dir / "smoke" / "staging" / "x.safetensors"
    staged.parent.mkdir(parents=True)
    staged.write_bytes(bytes(5000))
    before = [info.path for info in store.list()]

    cleanup()
    assert [info.path for info in store.list()] == before
    assert torn.exists()
    assert staged.exists()
    assert "rounds/smoke/hidden/h1" in str(asyncio.run(tables("cleanup"))[-1])
    assert "no round file names this round" in str(asyncio.run(tables("kept"))[-1])

    cleanup(dry_run=False)
    assert [path for path in before if not store.exists(path)] == ["rounds/smoke/hidden/h1/00000/states"]
    assert not torn.exists()
    assert not staged.parent.exists()


def test_a_pause_is_told_as_events_and_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []
    monkeypatch.setattr(
        "tasks.logs.emit_event", lambda name, resource, payload: events.append((name, resource["prefect.resource.id"]))
    )
    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        context: Any = Standing(disk, budget={"free_bytes": 1 << 20, "pause_seconds": 60})
        context.disk = context.guard()
        finish(context.store, "other")
        context.store.put("rounds/other/hidden/h1/00000/states", bytes(1 << 20))
        fill(disk, leave=1 << 19)
        ledger = Ledger()

        @flow
        def waits() -> None:
            tasks.watch_disk(context, ledger)
            context.disk.before("shard 1")

        waits()
    assert events == [(f"eagle3.disk.{kind}", "eagle3.round.mine") for kind in ("pause", "freed", "resume")]
    assert [note.split()[0] for note in ledger.notes] == ["freed", "paused"]
