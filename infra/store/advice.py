"""What mends trouble with an S3 server, by its error code or by how the connection failed."""

from botocore import exceptions as boto
from botocore.exceptions import ClientError

GENERAL = "check AWS_ENDPOINT_URL, the credentials in the environment, and that the bucket exists"
CHECKSUMS = "AWS_REQUEST_CHECKSUM_CALCULATION=when_required"
ANSWER_CHECKSUMS = "AWS_RESPONSE_CHECKSUM_VALIDATION=when_required"
UNKNOWN = frozenset({"NotImplemented", "501", "MethodNotAllowed", "405"})
"""Codes of servers that do not know what they are asked to do."""
_CREDENTIALS = "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN (or the block EAGLE3_STORE_BLOCK)"
_BY_CODE = {
    "make the bucket, or correct EAGLE3_STORE_URL": {"NoSuchBucket"},
    _CREDENTIALS: {"InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"},
    f"{_CREDENTIALS}, and what they may do in this bucket": {"AccessDenied", "403", "Forbidden", "AllAccessDisabled"},
    "set AWS_DEFAULT_REGION to the region of the bucket": {
        "AuthorizationHeaderMalformed", "PermanentRedirect", "301", "IllegalLocationConstraintException",
    },
    "set this machine's clock": {"RequestTimeTooSkewed"},
    "make room in the bucket, or let it be larger": {
        "QuotaExceeded", "507", "InsufficientStorage", "InsufficientCapacity", "XMinioStorageFull",
        "XMinioAdminBucketQuotaExceeded",
    },
    "the server is overloaded or out of order: see its log, and start again": {
        "SlowDown", "503", "ServiceUnavailable", "500", "InternalError", "502", "504",
    },
    f"if the server does not know the checksums of newer clients: {CHECKSUMS}": UNKNOWN | {
        "BadDigest", "InvalidDigest", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch", "InvalidArgument",
        "InvalidRequest", "MissingContentLength", "400", "BadRequest",
    },
}  # fmt: skip
_BY_KIND: dict[str, tuple[type[Exception], ...]] = {
    _CREDENTIALS: (boto.NoCredentialsError, boto.PartialCredentialsError, boto.ProfileNotFound),
    ANSWER_CHECKSUMS: (boto.FlexibleChecksumError,),
    "the server sends each request on to itself: check AWS_ENDPOINT_URL (http or https?)": (RecursionError,),
    "check HTTP_PROXY and HTTPS_PROXY, or name the host in NO_PROXY": (boto.ProxyConnectionError,),
    "set AWS_CA_BUNDLE to the certificates of the server's authority": (boto.SSLError,),
    "check AWS_ENDPOINT_URL, and that the server runs and can be reached": (
        boto.EndpointConnectionError, boto.ConnectTimeoutError, boto.ReadTimeoutError, boto.ConnectionClosedError,
    ),
}  # fmt: skip


def advice(error: BaseException) -> str:
    """What to do about an error of s3fs or botocore."""
    for kept in (error, error.__cause__):
        for fix, kinds in _BY_KIND.items():
            if isinstance(kept, kinds):
                return fix
    code = code_of(error)
    return next((fix for fix, codes in _BY_CODE.items() if code in codes), GENERAL)


def code_of(error: BaseException) -> str:
    """S3's own error code, which s3fs keeps in the cause; empty when there is none."""
    for candidate in (error, error.__cause__):
        if isinstance(candidate, ClientError):
            return str(candidate.response.get("Error", {}).get("Code", ""))
    return ""
