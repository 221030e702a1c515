"""What of an environment or a command line may be handed on or written down."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from infra.config.base import URL_PASSWORD
from infra.machine.processes import guard

_WORDS = "TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|KEY|APIKEY"
_SECRET_NAME = re.compile(rf"(?i)(^|_)({_WORDS})(_|$)")
_SECRET_OPTION = re.compile(rf"(?i)^(--?(?:[\w-]*[-_])?(?:{_WORDS}))(=.*)?$")
_LEFTOVER_NAME = re.compile(r"^(PREFECT_|PYTHON|VIRTUAL_ENV|CONDA_|__PYVENV|PIP_|UV_)")


def clean_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment for a program of another environment, with ``extra`` on top.

    Left out: Prefect's, Python's and virtual environments' variables (and their folder in PATH), installers' settings,
    and whatever looks like a secret by its name or holds a password in a URL. Who needs one passes it in ``extra``.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name != guard.MARK
        and not _LEFTOVER_NAME.match(name)
        and not _SECRET_NAME.search(name)
        and not URL_PASSWORD.search(value)
    }
    own = {str(Path(prefix, "bin")) for prefix in (os.environ.get("VIRTUAL_ENV"), _own_environment()) if prefix}
    kept["PATH"] = os.pathsep.join(
        part for part in os.environ.get("PATH", os.defpath).split(os.pathsep) if part not in own
    )
    return kept | dict(extra)


def _own_environment() -> str | None:
    return sys.prefix if sys.prefix != sys.base_prefix else None


def shown(command: tuple[str, ...]) -> list[str]:
    """A command as it may be written down: without the values of options that name a secret."""
    shown: list[str] = []
    hide = False
    for word in command:
        option = _SECRET_OPTION.match(word)
        if hide and not word.startswith("-"):
            shown.append("***")
        elif option and option[2]:
            shown.append(f"{option[1]}=***")
        else:
            shown.append(word)
        hide = option is not None and option[2] is None
    return shown
