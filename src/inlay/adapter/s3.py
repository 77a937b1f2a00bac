"""Requests for objects in S3 or a compatible store, signed with AWS Signature Version 4.

https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv.html. Keys, region and endpoint come
from the environment variables of the AWS tools: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_SESSION_TOKEN, AWS_REGION or AWS_DEFAULT_REGION, AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL.
Without keys, requests are not signed (public buckets).
"""

import hashlib
import hmac
from collections.abc import Mapping
from datetime import UTC, datetime
from urllib.parse import quote, urlsplit

from inlay.adapter.address import AdapterAddress

_ALGORITHM = "AWS4-HMAC-SHA256"
_EMPTY = hashlib.sha256(b"").hexdigest()


def request_of(
    address: AdapterAddress, environment: Mapping[str, str], now: datetime | None = None
) -> tuple[str, dict[str, str]]:
    """Return URL and headers of the request for an object.

    Args:
        address: s3://bucket/key.
        environment: environment variables of the process.
        now: signing time, UTC.
    """
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or "us-east-1"
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    if endpoint:
        # Compatible stores rarely have a host name for each bucket.
        base, path = endpoint.rstrip("/"), f"/{address.host}{address.path}"
    else:
        base, path = f"https://{address.host}.s3.{region}.amazonaws.com", address.path
    url = base + quote(path, safe="/-_.~")
    key, secret = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
    if not key or not secret:
        return url, {}
    headers = {
        "host": urlsplit(url).netloc,
        "x-amz-content-sha256": _EMPTY,
        "x-amz-date": (now or datetime.now(UTC)).strftime("%Y%m%dT%H%M%SZ"),
    }
    token = environment.get("AWS_SESSION_TOKEN")
    if token:
        headers["x-amz-security-token"] = token
    authorization = _authorization(url, headers, region, key, secret)
    del headers["host"]
    return url, {**headers, "authorization": authorization}


def _authorization(url: str, headers: Mapping[str, str], region: str, key: str, secret: str) -> str:
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    canonical = f"GET\n{urlsplit(url).path}\n\n{lines}\n{names}\n{_EMPTY}"
    date = headers["x-amz-date"]
    scope = f"{date[:8]}/{region}/s3/aws4_request"
    to_sign = f"{_ALGORITHM}\n{date}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    signing = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        signing = hmac.new(signing, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(signing, to_sign.encode(), hashlib.sha256).hexdigest()
    return f"{_ALGORITHM} Credential={key}/{scope}, SignedHeaders={names}, Signature={signature}"
