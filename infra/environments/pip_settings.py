"""Where pip is configured to find packages, told to uv, which reads none of pip's settings. Standard library only."""

import ast
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

FOREIGN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__", "UV_PYTHON", "UV_SYSTEM_PYTHON")
"""Variables of the caller's Python, not of the one that is installed into."""
SECTIONS = ("global", "install", ":env:")
"""Of pip's settings, the parts that count for `pip install`; a later one wins."""


class PipSettingsUnread(Exception):
    """pip did not say what its settings are."""


def own_environment() -> dict[str, str]:
    """This process's environment without what belongs to another Python."""
    return {name: value for name, value in os.environ.items() if name not in FOREIGN}


def pip_settings(python: Path) -> dict[str, str]:
    """What pip's files and variables set for `pip install`, e.g. ``{"find-links": "/wheels", "no-index": "1"}``.

    Args:
        python: a Python that has pip.

    Raises:
        PipSettingsUnread: it has none, or pip cannot read its files.
    """
    listed = subprocess.run(
        [str(python), "-I", "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        errors="replace",
        env=own_environment(),
        check=False,
    )
    if listed.returncode != 0:
        raise PipSettingsUnread(f"`pip config list` fails: {(listed.stderr.strip().splitlines() or ['no word'])[-1]}")
    found: dict[tuple[str, str], str] = {}
    for line in listed.stdout.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.rpartition(".")
        found[section, key] = ast.literal_eval(value)
    return {key: found[section, key] for section in SECTIONS for of, key in found if of == section}


def uv_variables(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """The same settings as environment variables of uv; URLs may hold passwords, so none is an argument.

    As with pip, any of the indexes may have the version that is pinned, and the system's certificates count.

    Args:
        settings: what :func:`pip_settings` gives.
        environment: variables of this process, for the certificates that pip takes from there.
    """
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_SYSTEM_CERTS": "true"}
    if not without_index(settings):
        variables["UV_DEFAULT_INDEX"] = settings.get("index-url", "").strip()
        variables["UV_INDEX"] = " ".join(settings.get("extra-index-url", "").split())
    variables["UV_FIND_LINKS"] = ",".join(_folders_and_pages(settings.get("find-links", "").split()))
    variables["UV_CONSTRAINT"] = " ".join(_expanded(settings.get("constraint", "").split()))
    variables["UV_INSECURE_HOST"] = " ".join(settings.get("trusted-host", "").split())
    variables["UV_HTTP_TIMEOUT"] = settings.get("timeout") or settings.get("default-timeout", "")
    variables["UV_HTTP_RETRIES"] = settings.get("retries", "")
    variables["SSL_CLIENT_CERT"] = settings.get("client-cert", "")
    if settings.get("keyring-provider") == "subprocess":
        variables["UV_KEYRING_PROVIDER"] = "subprocess"
    certificates = (
        settings.get("cert") or environment.get("REQUESTS_CA_BUNDLE") or environment.get("CURL_CA_BUNDLE") or ""
    )
    variables["SSL_CERT_DIR" if Path(certificates).is_dir() else "SSL_CERT_FILE"] = certificates
    if proxy := settings.get("proxy", ""):
        url = proxy if "://" in proxy else f"http://{proxy}"
        variables |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"), url)
    return {name: value for name, value in variables.items() if value}


def without_index(settings: Mapping[str, str]) -> bool:
    """Whether pip may ask no index at all."""
    return settings.get("no-index", "").lower() in ("1", "y", "yes", "t", "true", "on")


def _folders_and_pages(places: Iterable[str]) -> list[str]:
    """Places of ``find-links`` that uv can read; pip passes over a folder that is not there, uv stops at it."""
    found = []
    for place in _expanded(places):
        path = unquote(urlsplit(place).path) if place.startswith("file:") else place
        if Path(path).is_dir():
            found.append(path)
        elif place.startswith(("http:", "https:")):
            found.append(place)
    return found


def _expanded(paths: Iterable[str]) -> list[str]:
    return [os.path.expanduser(path) for path in paths]
