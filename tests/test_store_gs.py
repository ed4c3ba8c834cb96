"""A store under a gs:// URL, against a server on loopback that speaks the few requests of
Google's JSON API it needs."""

import http.server
import json
import threading
import urllib.parse

import pytest

import store
from test_store import assert_stored, damaged_images, make_arrays, make_schema, write_store


class Bucket(http.server.BaseHTTPRequestHandler):
    """One bucket called maps; objects: {name: (bytes, generation)}."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet for headers and body
    objects: dict[str, tuple[bytes, int]] = {}

    def log_message(self, *arguments) -> None:
        pass

    def answer(self, status: int, body: bytes = b"{}", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def parse(self) -> tuple[str, dict[str, str]]:
        """The object's name, "" for the bucket itself or None for another bucket, and the query."""
        url = urllib.parse.urlsplit(self.path)
        bucket, _, name = url.path.partition("/b/")[2].partition("/o")
        return urllib.parse.unquote(name[1:]) if bucket == "maps" else None, dict(
            urllib.parse.parse_qsl(url.query)
        )

    def do_POST(self) -> None:
        name, query = self.parse()
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if name is None:
            return self.answer(404)
        self.objects[query["name"]] = (data, len(self.objects) + 1)
        stored = {"name": query["name"], "generation": str(len(self.objects))}
        self.answer(200, json.dumps(stored).encode())

    def do_GET(self) -> None:
        name, query = self.parse()
        if name == "":
            first, end = query.get("startOffset", ""), query.get("endOffset", "~")
            items = [{"name": key} for key in sorted(self.objects) if first <= key < end]
            return self.answer(200, json.dumps({"items": items}).encode())
        if name not in self.objects:
            return self.answer(404)
        data, generation = self.objects[name]
        headers = {"x_goog_generation": str(generation)}
        if "Range" not in self.headers:
            return self.answer(200, data, **headers)
        first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
        start = int(first) if first else len(data) - int(last)
        stop = min(int(last) + 1, len(data)) if first and last else len(data)
        headers["Content_Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
        self.answer(206, data[start:stop], **headers)

    def do_DELETE(self) -> None:
        self.answer(204 if self.objects.pop(self.parse()[0], None) else 404, b"")


@pytest.fixture
def google(monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Bucket) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "token")
        yield
        server.shutdown()


def test_a_store_on_google_storage(google):
    schema = make_schema()
    arrays, url = make_arrays(schema), "gs://maps/folder/maps.zarr"
    write_store(url, schema, arrays, shard_bytes=4 * schema.bytes_per_image)
    assert_stored(store.open(url).gather([22, 1, 1]), arrays, [22, 1, 1])
    assert store.verify(url) == []
    with pytest.raises(store.StoreError, match="--overwrite"):
        store.create(url, schema)
    del Bucket.objects["folder/maps.zarr/gaussians/c/1/0/0/0/0"]
    assert damaged_images(url) == [(1, "gaussians", 4, 8)]
    write_store(url, schema, arrays, overwrite=True)
    assert store.verify(url) == []


def test_a_bucket_that_is_not_there(google):
    for call in (store.open, lambda url: store.create(url, make_schema())):
        with pytest.raises(store.StoreError, match="^gs://absent/maps.zarr.*$"):
            call("gs://absent/maps.zarr")
