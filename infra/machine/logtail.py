"""Reading a log that another process is writing."""

from pathlib import Path

TAIL_BYTES = 64 << 10


class LogTail:
    """Whole lines of a growing file, each once.

    Args:
        path: the file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def lines(self) -> list[str]:
        """Lines completed since the last call, without their ends."""
        if not self._path.is_file():
            return []
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            fresh = stream.read()
        # A progress bar ends its lines with a carriage return only.
        whole = fresh[: max(fresh.rfind(b"\n"), fresh.rfind(b"\r")) + 1]
        self._offset += len(whole)
        return [line for line in whole.decode(errors="replace").splitlines() if line]


def last_lines(path: Path, count: int | None = None) -> str:
    """The last ``count`` lines of a file (all of its last 64 KiB by default); empty when there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - TAIL_BYTES))
        text = stream.read().decode(errors="replace")
    return text if count is None else "\n".join(text.splitlines()[-count:])
