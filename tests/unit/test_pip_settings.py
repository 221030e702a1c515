"""pip's settings in uv's words."""

from pathlib import Path

import pytest

from infra.environments.pip_settings import uv_variables, without_index

ALWAYS = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_SYSTEM_CERTS": "true"}


@pytest.mark.parametrize(
    ("settings", "variables"),
    [
        ({}, {}),
        ({"no-color": "1", "quiet": "2", "require-virtualenv": "true"}, {}),
        ({"index-url": "https://one.example/simple"}, {"UV_DEFAULT_INDEX": "https://one.example/simple"}),
        (
            {"extra-index-url": "https://name:word@one.example/simple\nfile:///two/simple"},
            {"UV_INDEX": "https://name:word@one.example/simple file:///two/simple"},
        ),
        ({"no-index": "Yes", "index-url": "https://one.example/simple"}, {}),
        ({"no-index": "0", "index-url": "https://one.example/simple"}, {"UV_DEFAULT_INDEX": "https://one.example/simple"}),
        ({"constraint": "/a.txt\n/b.txt"}, {"UV_CONSTRAINT": "/a.txt /b.txt"}),
        ({"trusted-host": "one.example two.example:8080"}, {"UV_INSECURE_HOST": "one.example two.example:8080"}),
        ({"default-timeout": "180"}, {"UV_HTTP_TIMEOUT": "180"}),
        ({"timeout": "20", "default-timeout": "180"}, {"UV_HTTP_TIMEOUT": "20"}),
        ({"retries": "9"}, {"UV_HTTP_RETRIES": "9"}),
        ({"keyring-provider": "subprocess"}, {"UV_KEYRING_PROVIDER": "subprocess"}),
        ({"keyring-provider": "auto"}, {}),
        ({"cert": "/ca.pem", "client-cert": "/me.pem"}, {"SSL_CERT_FILE": "/ca.pem", "SSL_CLIENT_CERT": "/me.pem"}),
    ],
)  # fmt: skip
def test_each_setting_has_its_variable(settings: dict[str, str], variables: dict[str, str]) -> None:
    assert uv_variables(settings, {}) == ALWAYS | variables
    assert without_index(settings) == (settings.get("no-index") == "Yes")


def test_certificates_come_from_where_pip_takes_them(tmp_path: Path) -> None:
    environment = {"CURL_CA_BUNDLE": "/curl.pem"}
    assert uv_variables({}, environment)["SSL_CERT_FILE"] == "/curl.pem"
    environment["REQUESTS_CA_BUNDLE"] = str(tmp_path)
    assert uv_variables({}, environment)["SSL_CERT_DIR"] == str(tmp_path)
    assert uv_variables({"cert": "/own.pem"}, environment)["SSL_CERT_FILE"] == "/own.pem"


def test_proxy_counts_for_every_address() -> None:
    variables = uv_variables({"proxy": "name:word@proxy.example:3128"}, {})
    assert {variables[name] for name in ("HTTP_PROXY", "https_proxy", "ALL_PROXY")} == {
        "http://name:word@proxy.example:3128"
    }


def test_find_links_that_uv_would_stop_at_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "with space").mkdir()
    (tmp_path / "page.html").touch()
    places = [str(tmp_path), f"{tmp_path}/gone", f"file://{tmp_path}/with%20space", f"{tmp_path}/page.html"]
    settings = {"find-links": "\n".join([*places, "https://one.example/wheels"])}
    assert uv_variables(settings, {})["UV_FIND_LINKS"] == f"{tmp_path},{tmp_path}/with space,https://one.example/wheels"
