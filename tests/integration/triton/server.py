"""The real `tritonserver` of the wheel `nvidia-pytriton`, in an environment of its own, and a client beside it."""

from __future__ import annotations

import base64
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.own_environment import own_environment

ROOT = Path(__file__).resolve().parents[3]
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
WHEELS = ("nvidia-pytriton==0.7.0", "tritonclient[grpc]==2.73.0")
WAIT = 300.0
"""Seconds after which a test that hangs fails."""


def packages() -> Path:
    """The site-packages of the server, its client and what the runtime needs, installed once into the user's cache.

    Skips the test where they cannot be installed.
    """
    library = Path(sysconfig.get_config_var("LIBDIR")) / f"libpython{VERSION}.so"
    if sys.platform != "linux" or platform.machine() != "x86_64" or not library.exists():
        pytest.skip(f"Triton's wheels are for Linux on x86-64, and need a shared {library.name}")
    import tomllib  # Python 3.11

    runtime = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["dependencies"]
    folder = own_environment("triton", [*WHEELS, *runtime], "-c", str(ROOT / "constraints.txt"))
    return folder / "lib" / f"python{VERSION}" / "site-packages"


class Server:
    """A server of a model repository, and a client with a stream for each request."""

    def __init__(self, models: Path, folder: Path):
        """Start both; `folder` is for their files. Returns once all models are ready."""
        site = packages()
        python = _environment(folder / "environment", site)
        self._log = folder / "log.txt"
        self._lines: dict[int, list[dict[str, Any]]] = {}
        self._changed = threading.Condition()
        http, grpc = _free_port(), _free_port()
        triton = site / "pytriton" / "tritonserver"
        backends = folder / "backends"
        shutil.copytree(triton / "backends" / "python", backends / "python")
        stub = triton / "python_backend_stubs" / VERSION / "triton_python_backend_stub"
        shutil.copy(stub, backends / "python")
        # The stub is isolated: it reads no PYTHONPATH, but takes the environment of the first `python3` of PATH. It takes the
        # first shared library of Python, too, which must be of the same release.
        libraries = (sysconfig.get_config_var("LIBDIR"), site / "nvidia_pytriton.libs")
        environment = {
            **os.environ,
            "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
            "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        }
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [str(triton / "bin" / "tritonserver"), f"--model-repository={models}", f"--backend-directory={backends}",
                 "--http-address=127.0.0.1", f"--http-port={http}", "--grpc-address=127.0.0.1", f"--grpc-port={grpc}",
                 "--allow-metrics=false", "--allow-gpu-metrics=false"],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            self._wait_until_ready(f"http://127.0.0.1:{http}/v2/health/ready")
        except BaseException:
            self.kill()
            raise
        script = Path(__file__).with_name("client.py")
        self._client = subprocess.Popen(
            [str(python), str(script), f"127.0.0.1:{grpc}"], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, model: str, headers: dict[str, str] | None = None, **inputs: Any) -> int:
        """Ask, on a stream of its own; the number of the request. `image`: bytes, or a list of them."""
        number = len(self._lines)
        self._lines[number] = []
        if "image" in inputs:
            images = inputs["image"] if isinstance(inputs["image"], list) else [inputs["image"]]
            inputs["image"] = [base64.b64encode(each).decode() for each in images]
        self._write({"number": number, "model": model, "headers": headers or {}, "inputs": inputs})
        return number

    def cancel(self, number: int) -> None:
        """Cancel a request, as a client does that hangs up."""
        self._write({"cancel": number})

    def wait(self, number: int, count: int | None = None) -> list[dict[str, Any]]:
        """The responses of a request, once the last one has come, or `count` of them."""

        def there() -> bool:
            lines = self._lines[number]
            ended = bool(lines) and ("error" in lines[-1] or lines[-1]["finish_reason"] != "")
            return ended if count is None else len(lines) >= count

        with self._changed:
            assert self._changed.wait_for(there, WAIT), self._log.read_text("utf-8", "replace")[-4000:]
            return list(self._lines[number])

    def text(self, number: int) -> str:
        """That of all responses of a request."""
        return "".join(line["text"] for line in self.wait(number))

    def instances(self, model: str) -> list[int]:
        """Process ids of the instances of a model, in order."""
        found = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            words = path.read_bytes().split(b"\0") if path.exists() else []
            mine = (
                words
                and words[0].endswith(b"/triton_python_backend_stub")
                and str(self.process.pid).encode() in words
            )
            found |= {
                word: int(path.parent.name)
                for word in words
                if mine and word.startswith(f"{model}_0_".encode())
            }
        return [found[name] for name in sorted(found)]

    def stop(self) -> int:
        """End both; the exit status of the server, which unloads its models first."""
        self._close_client()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(WAIT)

    def kill(self) -> None:
        """End the server and its instances, whatever they do."""
        if hasattr(self, "_client"):
            self._close_client()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)  # of the session that was started above
            self.process.wait(WAIT)

    def _close_client(self) -> None:
        if self._client.poll() is None:
            assert self._client.stdin is not None
            self._client.stdin.close()
            self._client.wait(WAIT)

    def _write(self, command: dict[str, Any]) -> None:
        assert self._client.stdin is not None
        self._client.stdin.write(json.dumps(command) + "\n")
        self._client.stdin.flush()

    def _read(self) -> None:
        assert self._client.stdout is not None
        for line in self._client.stdout:
            told = json.loads(line)
            with self._changed:
                self._lines[told.pop("number")].append(told)
                self._changed.notify_all()

    def _wait_until_ready(self, address: str) -> None:
        begin = time.monotonic()
        while time.monotonic() < begin + WAIT and self.process.poll() is None:
            try:
                with urllib.request.urlopen(address, timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.1)
        pytest.fail(f"tritonserver does not start:\n{self._log.read_text('utf-8', 'replace')[-4000:]}")


def _environment(folder: Path, site: Path) -> Path:
    """The Python of a new environment with this checkout and the packages of `site`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    own = folder / "lib" / f"python{VERSION}" / "site-packages"
    (own / "checkout.pth").write_text(f"{site}\n{ROOT / 'src'}\n", "utf-8")
    return folder / "bin" / "python"


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
