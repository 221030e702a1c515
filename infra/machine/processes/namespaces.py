"""PID namespaces: the machine's own, from which all processes are seen, and those of containers."""

import os
from pathlib import Path

_FIRST = "pid:[4026531836]"
"""The machine's own (PROC_PID_INIT_INO of the kernel); a container has another."""


def whole_table_visible() -> bool:
    """Whether every process of the machine can be seen: not from a container, nor where /proc hides others'."""
    try:
        own = os.readlink("/proc/self/ns/pid") == _FIRST
    except OSError:
        return False
    return own and Path("/proc/1/stat").exists()


def is_gone(namespace: str) -> bool:
    """Whether no process of the machine is in a namespace (``pid:[...]``); False where that cannot be told."""
    if not whole_table_visible():
        return False
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if name != "1" and os.readlink(f"/proc/{name}/ns/pid") == namespace:
                return False
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            return False
    return True
