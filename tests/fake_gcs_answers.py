"""What fake_gcs answers: descriptions of objects as JSON and XML, listings, errors."""

import base64
import datetime
import hashlib
import json
import xml.sax.saxutils
from typing import NamedTuple

BUCKET = "fake-bucket"


class Request(NamedTuple):
    """What a client has asked. kind: list, read, stat, write, part, delete or copy."""

    method: str
    kind: str
    bucket: str
    name: str  # of the object; of a list, the prefix
    query: dict[str, str]  # with a precondition of the XML API's headers
    is_xml: bool = False


class Stored(NamedTuple):
    """One generation of an object. updated: seconds since 1970."""

    data: bytes
    generation: int
    updated: float


def described(name: str, stored: Stored) -> dict:
    return {
        "bucket": BUCKET,
        "name": name,
        "generation": str(stored.generation),
        "metageneration": "1",
        "size": str(len(stored.data)),
        "md5Hash": base64.b64encode(hashlib.md5(stored.data).digest()).decode(),
        "etag": md5(stored.data),
        "updated": _time(stored, "%Y-%m-%dT%H:%M:%S.%fZ"),
    }


def headers_of(stored: Stored) -> dict[str, str]:
    return {
        "ETag": f'"{md5(stored.data)}"',
        "Last-Modified": _time(stored, "%a, %d %b %Y %H:%M:%S GMT"),
        "x-goog-generation": str(stored.generation),
    }


def listed(items: list[dict], prefixes: list[str], rest: str | None):
    entries = "".join(
        f"<Contents>{_tags(Key=item['name'], Size=item['size'], ETag=item['etag'])}"
        f"{_tags(LastModified=item['updated'], Generation=item['generation'])}</Contents>"
        for item in items
    )
    entries += "".join(
        f"<CommonPrefixes>{_tags(Prefix=prefix)}</CommonPrefixes>" for prefix in prefixes
    )
    more = _tags(NextContinuationToken=rest) if rest else ""
    return 200, {}, f"<ListBucketResult>{entries}{more}</ListBucketResult>".encode()


def _tags(**texts: str) -> str:
    escape = xml.sax.saxutils.escape
    return "".join(f"<{name}>{escape(text)}</{name}>" for name, text in texts.items())


def xml_of(name: str, **texts: str) -> bytes:
    texts = {"Bucket": BUCKET, "Key": "-"} | texts
    return f"<{name}>{_tags(**texts)}</{name}>".encode()


def error(request: Request, status: int, words: str) -> bytes:
    if request.is_xml:
        return xml_of("Error", Code=str(status), Message=words)
    return json.dumps({"error": {"code": status, "message": words}}).encode()


def md5(data: bytes) -> str:
    return hashlib.md5(data).hexdigest()


def _time(stored: Stored, form: str) -> str:
    return datetime.datetime.fromtimestamp(stored.updated, datetime.UTC).strftime(form)


def json_of(value: dict) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json; charset=UTF-8"}, json.dumps(value).encode()
