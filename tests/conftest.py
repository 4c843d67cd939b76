"What holds for all tests: the same examples and random numbers in every run, a cache of their own, a publisher on this machine."

import http.server
import threading

import pytest
import torch
from hypothesis import settings

# property tests are judged by what they find, not by how long the first example takes on a busy machine
settings.register_profile("book", deadline=None, derandomize=True)
settings.load_profile("book")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def home(tmp_path, monkeypatch):
    "An empty cache, and no data of the user's own."
    monkeypatch.setenv("BFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("BFT_DATA", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def publisher(tmp_path):
    "a folder served over HTTP, whole files only (no ranges); files named truncated* announce more bytes than they send, unsized* none"
    root = tmp_path / "publisher"
    root.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args): super().__init__(*args, directory=str(root))

        def log_message(self, *_): pass

        def do_GET(self):
            if "unsized" in self.path:
                self.send_response(200)
                self.end_headers()
                return self.wfile.write((root / self.path[1:]).read_bytes())
            if "truncated" not in self.path: return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            self.wfile.write(b"x" * 10)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield root, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
