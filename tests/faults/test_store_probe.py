"""Doctor and preflight find what an S3 server does not do: moto's server behind a proxy that refuses, over HTTP."""

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import boto3
import pytest
from moto.moto_server.threaded_moto_server import ThreadedMotoServer

from deployments.cli import doctor
from infra.config.settings import Settings
from infra.errors import StoreError
from infra.store.objects import ObjectStore
from infra.store.probe import PREFIX, store_faults

Headers = dict[str, str]
Refusal = Callable[[str, Headers], tuple[int, str] | None]
"""Looks at method and headers (lower case), may change these; status and S3's code when it refuses the request."""


class Gateway(ThreadingHTTPServer):
    """Passes requests on to the real server, unless ``refusal`` refuses them."""

    refusal: Refusal
    behind: str


class Pass(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Gateway

    def _pass(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        refused = self.server.refusal(self.command, headers)
        if refused is not None:
            status, code = refused
            page = f"<Error><Code>{code}</Code><Message>refused</Message></Error>".encode() if code else b""
            self._answer(status, {"Content-Type": "application/xml"}, page)
            return
        behind = http.client.HTTPConnection(urlsplit(self.server.behind).netloc)
        behind.request(self.command, self.path, body, headers)
        reply = behind.getresponse()
        kept = {name: value for name, value in reply.getheaders() if name.lower() not in HOP}
        self._answer(reply.status, kept, reply.read(), dict(reply.getheaders()).get("Content-Length"))
        behind.close()

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass

    def _answer(self, status: int, headers: Headers, body: bytes, length: str | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", length if self.command == "HEAD" and length else str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


HOP = {"content-length", "connection", "transfer-encoding", "date", "server"}


def checksums(method: str, headers: Headers) -> tuple[int, str] | None:
    told = any(name.startswith(("x-amz-checksum-", "x-amz-trailer", "x-amz-sdk-checksum")) for name in headers)
    return (501, "NotImplemented") if method == "PUT" and told else None


def overwrites(method: str, headers: Headers) -> tuple[int, str] | None:
    headers.pop("if-none-match", None)
    return None


def knows_no_condition(method: str, headers: Headers) -> tuple[int, str] | None:
    return (501, "NotImplemented") if "if-none-match" in headers else None


def always_fails_conditions(method: str, headers: Headers) -> tuple[int, str] | None:
    return (412, "PreconditionFailed") if "if-none-match" in headers else None


def ignores_range(method: str, headers: Headers) -> tuple[int, str] | None:
    headers.pop("range", None)
    return None


def denies_delete(method: str, headers: Headers) -> tuple[int, str] | None:
    return (403, "AccessDenied") if method == "DELETE" else None


def deletes_nothing(method: str, headers: Headers) -> tuple[int, str] | None:
    return (204, "") if method == "DELETE" else None


def denies_looking(method: str, headers: Headers) -> tuple[int, str] | None:
    return (403, "AccessDenied") if method == "HEAD" else None


def refuses_checksums_of_answers(method: str, headers: Headers) -> tuple[int, str] | None:
    return (400, "InvalidArgument") if "x-amz-checksum-mode" in headers else None


def knows_no_parts(method: str, headers: Headers) -> tuple[int, str] | None:
    return (405, "") if method == "POST" else None


def is_full(method: str, headers: Headers) -> tuple[int, str] | None:
    return (507, "QuotaExceeded") if method == "PUT" else None


def sends_in_a_circle(method: str, headers: Headers) -> tuple[int, str] | None:
    return (302, "")


def wrong_credentials(method: str, headers: Headers) -> tuple[int, str] | None:
    return (403, "InvalidAccessKeyId")


def read_only(method: str, headers: Headers) -> tuple[int, str] | None:
    return (403, "AccessDenied") if method == "PUT" else None


def other_region(method: str, headers: Headers) -> tuple[int, str] | None:
    return (400, "AuthorizationHeaderMalformed") if method == "PUT" else None


def wrong_clock(method: str, headers: Headers) -> tuple[int, str] | None:
    return (403, "RequestTimeTooSkewed")


def all_well(method: str, headers: Headers) -> tuple[int, str] | None:
    return None


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    """A bucket ``states`` behind a gateway; the environment points at the gateway."""
    with pytest.MonkeyPatch.context() as patch, Gateway(("127.0.0.1", 0), Pass) as gateway:
        server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        gateway.behind = "http://{}:{}".format(*server.get_host_and_port())
        gateway.refusal = all_well
        threading.Thread(target=gateway.serve_forever, args=(0.05,), daemon=True).start()
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{gateway.server_address[1]}")
        patch.setenv("AWS_ACCESS_KEY_ID", "key")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "hush-hush")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        boto3.client("s3", endpoint_url=gateway.behind).create_bucket(Bucket="states")
        yield gateway
        gateway.shutdown()
        server.stop()


@pytest.fixture(autouse=True)
def _well_again(gateway: Gateway) -> Iterator[None]:
    yield
    gateway.refusal = all_well
    client = boto3.client("s3", endpoint_url=gateway.behind)
    for item in client.list_objects_v2(Bucket="states").get("Contents", []):
        client.delete_object(Bucket="states", Key=item["Key"])


@pytest.mark.parametrize(
    ("refusal", "said", "fix"),
    [
        (checksums, "could not write", "set AWS_REQUEST_CHECKSUM_CALCULATION=when_required (tried just now: it works)"),
        (overwrites, "does not keep to If-None-Match: it overwrote", "no setting mends this"),
        (knows_no_condition, "refuses a conditional write (If-None-Match)", "no setting mends this"),
        (always_fails_conditions, "it would not write one that was absent", "no setting mends this"),
        (ignores_range, "ignores Range", "no proxy before the server drops the header"),
        (denies_delete, "cannot be deleted", "s3:DeleteObject"),
        (denies_looking, "could not read", "what they may do in this bucket"),
        (denies_looking, "cannot be looked at", "s3:ListBucket"),
        (refuses_checksums_of_answers, "could not read", "set AWS_RESPONSE_CHECKSUM_VALIDATION=when_required (tried"),
        (knows_no_parts, "could not begin an upload", "or use another server, or a folder"),
        (is_full, "QuotaExceeded", "make room in the bucket"),
        (sends_in_a_circle, "could not write", "check AWS_ENDPOINT_URL (http or https?)"),
        (deletes_nothing, "is deleted, and it is still there", ""),
        (wrong_credentials, "InvalidAccessKeyId", "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY"),
        (read_only, "could not write", "what they may do in this bucket"),
        (other_region, "could not write", "AWS_DEFAULT_REGION"),
        (wrong_clock, "could not write", "clock"),
    ],
)
def test_what_a_server_does_not_do_is_found_with_what_mends_it(
    gateway: Gateway, refusal: Refusal, said: str, fix: str
) -> None:
    gateway.refusal = refusal
    store = ObjectStore("s3://states/rounds")
    faults = store_faults(store)
    assert any(said in fault.what for fault in faults), faults
    assert any(fix in fault.fix for fault in faults), faults
    assert len(faults) <= (1 if refusal is refuses_checksums_of_answers else 2)


def test_a_server_that_does_all_has_no_fault_and_nothing_is_left(gateway: Gateway) -> None:
    store = ObjectStore("s3://states/rounds")
    assert store_faults(store) == []
    assert store.list() == []


def test_the_remedy_for_checksums_works_in_the_environment(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    gateway.refusal = checksums
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
    assert store_faults(ObjectStore("s3://states/rounds")) == []


def test_a_missing_bucket_is_named(gateway: Gateway) -> None:
    [fault] = store_faults(ObjectStore("s3://nowhere/rounds"))
    assert "s3://nowhere/rounds" in fault.what
    assert fault.fix == "make the bucket, or correct EAGLE3_STORE_URL"


def test_a_server_that_is_not_there_is_named(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    [fault] = store_faults(ObjectStore("s3://states/rounds"))
    assert fault.fix == "check AWS_ENDPOINT_URL, and that the server runs and can be reached"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AWS_ENDPOINT_URL", "127.0.0.1:9000"),
        ("AWS_REQUEST_CHECKSUM_CALCULATION", "never"),
        ("AWS_RESPONSE_CHECKSUM_VALIDATION", "1"),
        ("AWS_RETRY_MODE", "often"),
        ("AWS_MAX_ATTEMPTS", "many"),
        ("AWS_DEFAULT_REGION", "us east"),
        ("AWS_PROFILE", "no-such-profile"),
    ],
)
def test_a_malformed_variable_is_one_sentence(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    [fault] = store_faults(ObjectStore("s3://states/rounds"))
    assert "AWS_" in fault.fix


def test_a_proxy_is_not_asked_for_a_server_on_loopback(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    assert store_faults(ObjectStore("s3://states/rounds")) == []


def test_a_socks_proxy_before_a_bucket_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://s3.example")
    monkeypatch.setenv("HTTPS_PROXY", "socks5://127.0.0.1:9")
    with pytest.raises(StoreError, match="SOCKS proxy of HTTPS_PROXY"):
        ObjectStore("s3://states/rounds").list()


def test_doctor_says_it(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3_STORE_URL", "s3://states/rounds")
    checks = list(doctor._store(Settings()))
    assert [check.state for check in checks] == ["ok"]
    gateway.refusal = checksums
    [check] = doctor._store(Settings())
    assert check.state == "fault"
    assert "AWS_REQUEST_CHECKSUM_CALCULATION=when_required" in check.fix
    assert json.dumps(check.found)


def test_probes_do_not_count_as_what_a_round_made(gateway: Gateway) -> None:
    gateway.refusal = denies_delete
    store = ObjectStore("s3://states/rounds")
    assert store_faults(store)
    assert all(info.path.startswith(PREFIX) for info in store.list())
