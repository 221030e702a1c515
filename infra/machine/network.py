"""What the environment says of proxies and certificates: loopback is kept out of it, and what is unusable is named."""

import ipaddress
import os
import re
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from infra.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
PROXY_SCHEMES = ("http", "https", "socks5", "socks5h")
"""What httpx takes (0.28, _config.py, Proxy)."""
NO_PROXY = ("NO_PROXY", "no_proxy")
CERTIFICATES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "AWS_CA_BUNDLE")
_HOST = re.compile(r"[\w*.-]+(:\d+)?", re.ASCII)
_CREDENTIALS = re.compile(r"(^|://)\S*@")
_NAME = re.compile(r"[\w.-]+")
_DOTTED = re.compile(r"\d+(\.\d+){3}", re.ASCII)


def reach_loopback() -> str:
    """Let no proxy of the environment come between this machine's servers and this process or what it starts.

    Addresses of IPv6 are written as every client reads them. Networks of IPv6 are taken out: beside one httpx, which
    Prefect uses, cannot open a client (0.28, _utils.py).

    Returns:
        What a person must know of it, in a sentence; empty when nothing changes for them.
    """
    entries = {entry: _plain(entry) for entry in _entries()}
    hosts = [host for host in entries.values() if host]
    if "*" in hosts:
        hosts = ["*"]  # beside others it means nothing to urllib
    else:
        hosts = list(dict.fromkeys([*hosts, *LOOPBACK]))
    os.environ.update(dict.fromkeys(NO_PROXY, ",".join(hosts)))
    networks = [entry for entry, host in entries.items() if not host]
    if not networks or not any(os.environ.get(name) for upper in PROXIES for name in (upper, upper.lower())):
        return ""
    return f"NO_PROXY: networks of IPv6 ({', '.join(networks)}) are not used here; name the hosts themselves"


def is_loopback(url: str) -> bool:
    """Whether a URL leads to this very machine."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def network_faults() -> list[str]:
    """What is wrong with the variables that lead out of this machine, a sentence each; empty when nothing is."""
    return [*_proxy_faults(), *_no_proxy_faults(), *_certificate_faults()]


def check_network() -> None:
    """See that the variables that lead out of this machine can be used, before anything is started that reads them.

    Raises:
        ConfigError: one cannot; every one is named.
    """
    if faults := network_faults():
        raise ConfigError("; ".join(faults), fix="correct these environment variables, or unset them")


def _proxy_faults() -> Iterator[str]:
    for name in (spelled for upper in PROXIES for spelled in (upper, upper.lower())):
        value = os.environ.get(name, "")
        if value.strip() and (why := _proxy_fault(value)):
            shown = _CREDENTIALS.sub(r"\1***@", value.strip())
            yield f"{name}={repr(shown)[1:-1]} is no proxy: {why}"


def _proxy_fault(value: str) -> str:
    if value != value.strip():
        return "there are blanks around it"
    try:
        url = urlsplit(value if "://" in value else f"http://{value}")
        if url.scheme not in PROXY_SCHEMES:
            return f"its kind is {url.scheme!r}, and {', '.join(PROXY_SCHEMES)} are known"
        host = url.hostname or ""
        named = ":" in host or _NAME.fullmatch(host)
        if not named or re.search(r"\s", value) or url.port == 0:
            return "it names no host, as http://host:port does"
        if _DOTTED.fullmatch(host):
            ipaddress.ip_address(host)
    except ValueError:
        return "it cannot be read as http://host:port"
    return ""


def _no_proxy_faults() -> Iterator[str]:
    for entry in _entries():
        plain = _plain(entry)
        if plain and not (_address(plain) or _HOST.fullmatch(plain) or _pattern(plain)):
            yield f"NO_PROXY names {entry!r}, which is neither a host nor an address nor a network"


def _certificate_faults() -> Iterator[str]:
    for name in CERTIFICATES:
        value = os.environ.get(name, "")
        if not value or (name != "SSL_CERT_FILE" and Path(value).is_dir()):
            continue
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=value)
        except OSError as error:  # an SSLError is one, too
            said = error.strerror if error.errno and not isinstance(error, ssl.SSLError) else "it holds no certificate"
            yield f"{name}={value} cannot be read as certificates: {said}"
    if log := os.environ.get("SSLKEYLOGFILE", ""):
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).keylog_filename = log
        except OSError as error:
            yield f"SSLKEYLOGFILE={log} cannot be written: {error.strerror}"
    folder = os.environ.get("SSL_CERT_DIR", "")
    if missing := [part for part in folder.split(os.pathsep) if part and not Path(part).is_dir()]:
        yield f"SSL_CERT_DIR={folder} cannot be read as certificates: {missing[0]} is no folder"


def _entries() -> list[str]:
    """What the two spellings of NO_PROXY name, each once."""
    named = [entry.strip() for name in NO_PROXY for entry in re.split(r"[,\s]", os.environ.get(name, ""))]
    return [entry for entry in dict.fromkeys(named) if entry]


def _plain(entry: str) -> str:
    """An entry in the spelling that every client reads; empty when it is a network of IPv6."""
    bracketed = re.fullmatch(r"\[([^\]]+)\](:\d+)?", entry)
    plain = bracketed[1] if bracketed else entry.replace("[", "").replace("]", "") if "]/" in entry else entry
    return "" if ":" in plain and "/" in plain and _address(plain) else plain


def _pattern(text: str) -> bool:
    """Whether it is what httpx knows beside hosts: a URL without a path."""
    try:
        return "://" in text and urlsplit(text).port != 0
    except ValueError:
        return False


def _address(text: str) -> bool:
    """Whether it is an address or a network."""
    try:
        ipaddress.ip_network(text.partition("%")[0], strict=False)
    except ValueError:
        return False
    return True
