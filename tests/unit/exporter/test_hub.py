"""Models of the hub, served by a stand-in on this machine that counts what it sends."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from vlmexport.exporter.pipeline import BuildRequest
from vlmexport.exporter.pipeline.dry_run import dry_run

from tests.support import tiny_models
from tests.support.quantized_checkpoints import write_quantized

COMMIT = "0123456789abcdef0123456789abcdef01234567"
MODEL = "someone/tiny"
HEADER = 100_001
"""Bytes that the hub's client asks of every shard."""


class Hub:
    """One model behind the addresses of the hub's API that its client uses. `sent` counts bytes by file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sent = folder, Counter[str]()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: object) -> None:
                return

            def do_HEAD(self) -> None:
                self.answer(body=False)

            def do_GET(self) -> None:
                self.answer(body=True)

            def answer(self, body: bool) -> None:
                path = self.path.partition("?")[0]
                files = sorted(p for p in hub.folder.iterdir() if p.is_file())
                if path == f"/api/models/{MODEL}" or path == f"/api/models/{MODEL}/revision/main":
                    return self.reply(
                        {"id": MODEL, "sha": COMMIT, "siblings": [{"rfilename": p.name} for p in files]}, body
                    )
                if path.startswith(f"/api/models/{MODEL}/tree/"):
                    rows = [
                        {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": _oid(p)}
                        for p in files
                    ]
                    return self.reply(rows, body)
                match = re.fullmatch(rf"/{MODEL}/resolve/[^/]+/([^/]+)", path)
                file = hub.folder / match[1] if match else None
                if file is None or not file.is_file():
                    self.send_response(404)
                    self.send_header("X-Error-Code", "EntryNotFound")
                    self.send_header("X-Repo-Commit", COMMIT)
                    self.send_header("Content-Length", "0")
                    return self.end_headers()
                data = file.read_bytes()
                span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
                self.send_response(206 if span else 200)
                if span:
                    last = min(int(span[2] or len(data) - 1), len(data) - 1)
                    self.send_header("Content-Range", f"bytes {span[1]}-{last}/{len(data)}")
                    data = data[int(span[1]) : last + 1]
                self.send_header("ETag", f'"{_oid(file)}"')
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if body:
                    hub.sent[file.name] += len(data)
                    self.wfile.write(data)
                return None

            def reply(self, document: object, body: bool) -> None:
                data = json.dumps(document).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if body:
                    self.wfile.write(data)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"


def _oid(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    (tmp_path / "served").mkdir()
    found = Hub(tmp_path / "served")
    thread = threading.Thread(target=found.server.serve_forever, daemon=True)
    thread.start()
    yield found
    found.server.shutdown()
    found.server.server_close()
    thread.join()


def serve(hub: Hub, source: Path, form: str) -> None:
    """The checkpoint with 3 MB in every shard that no graph reads, so that a download shows."""
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, hub.folder / path.name)
    tensors = load_file(source / "model.safetensors")
    if form == "bin":
        torch.save(tensors, hub.folder / "pytorch_model.bin")
        return
    names = {n: f"model-{i % 2}.safetensors" if form == "shards" else "model.safetensors"
             for i, n in enumerate(sorted(tensors))}  # fmt: skip
    for file in sorted(set(names.values())):
        ballast = {f"unused.{file}": torch.zeros(750_000)}
        save_file(
            {n: t for n, t in tensors.items() if names[n] == file} | ballast,
            hub.folder / file,
            metadata={"format": "pt"},
        )
        names |= dict.fromkeys(ballast, file)
    if form == "shards":
        (hub.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def vlmexport(hub: Hub, home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which alone reads HF_ENDPOINT."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
    environment = {**kept, "HF_ENDPOINT": hub.address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, "-m", "vlmexport.runtime.cli", "build", "--model", MODEL, *arguments],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("form", [pytest.param("single", marks=pytest.mark.slow), "shards"])
def test_a_dry_run_fetches_headers_only(
    hub: Hub, tiny_checkpoint: Callable[..., Path], tmp_path: Path, form: str
) -> None:
    source = tiny_checkpoint("llama")
    serve(hub, source, form)
    options = ("--draft-layer", "1", "-o", str(tmp_path / "bundle"), "--dry-run", "--json")
    done = vlmexport(hub, tmp_path / "home", *options)
    assert done.returncode == 0, done.stderr
    shards = sorted(p.name for p in hub.folder.glob("*.safetensors"))
    assert len(shards) == (2 if form == "shards" else 1)
    assert {name: hub.sent[name] for name in shards} == dict.fromkeys(shards, HEADER)
    found = json.loads(done.stdout)
    local = dry_run(BuildRequest(model=str(source), output=tmp_path / "bundle", draft_layer=1))
    expected = {"schema_version": 1, **local.model_dump(mode="json")}
    told = {"model", "notices", "peak_memory", "seconds"}  # ballast takes memory and time
    assert {k: v for k, v in found.items() if k not in told} == {
        k: v for k, v in expected.items() if k not in told
    }


def test_a_build_is_refused_before_shards_are_fetched(
    hub: Hub, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    serve(hub, tiny_checkpoint("llama"), "single")
    (hub.folder / "generation_config.json").write_text('{"eos_token_id": 1, "bad_words_ids": [[99999]]}')
    done = vlmexport(hub, tmp_path / "home", "-o", str(tmp_path / "bundle"))
    assert done.returncode == 2 and "bad_words_ids holds 99999" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert hub.sent["model.safetensors"] == HEADER and not (tmp_path / "bundle").exists()


@pytest.mark.slow
def test_a_build_fetches_what_the_checks_only_described(
    hub: Hub, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """And the dry run of a model that is in the cache as a whole fetches nothing of it."""
    serve(hub, tiny_checkpoint("llama-tied"), "single")
    options = ("--draft-layer", "1", "-o", str(tmp_path / "bundle"), "--json")
    done = vlmexport(hub, tmp_path / "home", *options)
    assert done.returncode == 0, done.stderr
    size = (hub.folder / "model.safetensors").stat().st_size
    assert hub.sent["model.safetensors"] == HEADER + size
    assert "generation" in {row["graph"] for row in json.loads(done.stdout)["parity"]}
    hub.sent.clear()
    done = vlmexport(hub, tmp_path / "home", *options, "--dry-run", "--force")
    assert done.returncode == 0, done.stderr
    assert hub.sent["model.safetensors"] == 0


@pytest.mark.slow
def test_a_model_without_safetensors_is_fetched(
    hub: Hub, tiny_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    serve(hub, tiny_checkpoint("llama"), "bin")
    done = vlmexport(hub, tmp_path / "home", "-o", str(tmp_path / "bundle"), "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    assert hub.sent["pytorch_model.bin"] == (hub.folder / "pytorch_model.bin").stat().st_size


@pytest.mark.slow
def test_a_quantized_model_is_known_by_its_headers(hub: Hub, tmp_path: Path) -> None:
    plain = tiny_models.checkpoint("llama", tmp_path / "plain")
    write_quantized(plain, tmp_path / "quantized", "gptq-act-order")
    serve(hub, tmp_path / "quantized", "single")
    done = vlmexport(
        hub, tmp_path / "home", "--draft-layer", "1", "-o", str(tmp_path / "bundle"), "--dry-run", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert hub.sent["model.safetensors"] == HEADER
    request = BuildRequest(model=str(plain), output=tmp_path / "bundle", draft_layer=1)
    assert json.loads(done.stdout)["parameters"] == dry_run(request).parameters


def test_a_missing_shard_is_one_line(hub: Hub, tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    serve(hub, tiny_checkpoint("llama"), "shards")
    (hub.folder / "model-1.safetensors").unlink()
    done = vlmexport(hub, tmp_path / "home", "-o", str(tmp_path / "bundle"), "--dry-run")
    assert done.returncode == 2 and "misses the shard model-1.safetensors" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_damaged_header_is_one_line(hub: Hub, tiny_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    serve(hub, tiny_checkpoint("llama"), "shards")
    (hub.folder / "model-1.safetensors").write_bytes(b"\x10" * 400)
    done = vlmexport(hub, tmp_path / "home", "-o", str(tmp_path / "bundle"), "--dry-run")
    assert done.returncode == 2 and "SafetensorsParsingError" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
