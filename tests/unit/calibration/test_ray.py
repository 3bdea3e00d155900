"""`--ray ADDRESS`: actors of a cluster give the answers that this machine gives."""

from __future__ import annotations

import os
import subprocess
import sysconfig
import venv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from vlmexport.runtime import cli

from tests.support.training_targets import make_target

ROOT = Path(__file__).parents[3]
RELEASE = "ray==2.60.0"
"""What is installed where the environment names no `VLMEXPORT_RAY`: the interpreter of an environment that has Ray."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with Ray, in an environment of its own, which also sees what this one has."""
    if given := os.environ.get("VLMEXPORT_RAY"):
        return Path(given)
    folder = tmp_path_factory.mktemp("ray") / "venv"
    venv.create(folder, with_pip=True)
    found = folder / "bin" / "python"
    pip = [found, "-m", "pip", "install", "-q", "--disable-pip-version-check", RELEASE]
    if subprocess.run(pip, capture_output=True, timeout=500, check=False).returncode:
        pytest.skip(f"{RELEASE} cannot be installed here")
    place = subprocess.run(
        [found, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True,
    ).stdout.strip()  # fmt: skip
    also = [ROOT / "src", ROOT / "models", sysconfig.get_path("purelib")]
    (Path(place) / "vlmexport.pth").write_text("".join(f"{path}\n" for path in also))
    return found


@pytest.fixture(scope="module")
def cluster(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster of one node with two cores, on loopback."""
    script = """
import ray, sys
context = ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False,
                   logging_level="ERROR", _node_ip_address="127.0.0.1", _temp_dir=sys.argv[1])
print(context.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""
    # Sockets have names of at most 107 bytes: not below the folder of this test.
    place = Path("/tmp") / f"ray-{os.getpid()}"
    running = subprocess.Popen(
        [python, "-c", script, str(place)], env=environment(), text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert running.stdin is not None and running.stdout is not None
    try:
        address = running.stdout.readline().strip()
        if not address:
            pytest.skip("Ray starts no cluster here")
        yield address
    finally:
        running.stdin.close()
        running.wait(60)


def environment() -> dict[str, str]:
    """Of the cluster and of those who join it: they have one token."""
    given = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "5" * 64, "RAY_USAGE_STATS_ENABLED": "0"}
    return os.environ | given | {"OMP_NUM_THREADS": "1"}


def run(python: Path, *words: object) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in (python, "-m", "vlmexport.runtime.cli", *words)]
    return subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and pictures, of which one is damaged."""
    folder = tmp_path_factory.mktemp("asked")
    make_target("blip2-t5", folder / "model")
    (folder / "pictures").mkdir()
    for number in range(9):
        pixels = np.random.default_rng(number).integers(0, 255, (30, 40, 3), np.uint8)
        Image.fromarray(pixels).save(folder / "pictures" / f"{number}.png")
    (folder / "pictures" / "4.png").write_bytes(b"damaged")
    return folder


@pytest.mark.slow
def test_a_cluster_gives_the_same_answers(python: Path, cluster: str, folder: Path):
    """`generate-data` and `caption`; a run that was begun here goes on there."""
    asked = ["generate-data", "--model", folder / "model", "--data", f"images:{folder / 'pictures'}"]
    asked += ["--max-new-tokens", 6, "--shard-size", 4, "--batch-size", 2, "--device", "cpu"]
    here, there = folder / "here", folder / "there"
    assert cli.main([str(word) for word in (*asked, "-o", here, "--engine", "runtime")]) == 0
    done = run(python, *asked, "-o", there, "--ray", cluster)
    assert done.returncode == 0, done.stderr[-3000:]
    shards = sorted(path.name for path in here.glob("shard-*"))
    assert len(shards) == 2 and [(here / s).read_bytes() for s in shards] == [
        (there / s).read_bytes() for s in shards
    ]
    (bundle,) = (Path(os.environ["VLMEXPORT_CACHE"]) / "bundles").glob("model-*[!k]")
    asked = [
        "caption",
        bundle,
        folder / "pictures",
        "--max-new-tokens",
        6,
        "--max-batch",
        2,
        "--shard-size",
        3,
    ]
    one, two = folder / "one.parquet", folder / "two.parquet"
    assert cli.main([str(word) for word in (*asked, "-o", one)]) == 0
    done = run(python, *asked, "-o", two, "--ray", cluster)
    assert done.returncode == 0 and "1 of 9 pictures" in done.stderr, done.stderr[-3000:]
    assert one.read_bytes() == two.read_bytes()
    again = run(python, *asked, "-o", one, "--ray", cluster)
    assert again.returncode == 0 and "was complete" in again.stderr


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_one_line(python: Path, folder: Path):
    asked = ["generate-data", "--model", folder / "model", "--data", f"images:{folder / 'pictures'}"]
    asked += ["--max-new-tokens", 6, "-o", folder / "nowhere", "--batch-size", 2]
    done = run(python, *asked, "--ray", "127.0.0.1:1")
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(
        "vlmexport: --ray 127.0.0.1:1: no cluster answers there"
    )


def test_what_does_not_go_with_a_cluster_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    asked = [
        "generate-data",
        "--model",
        folder / "model",
        "--data",
        f"images:{folder / 'pictures'}",
        "-o",
        tmp_path / "out",
    ]

    def said(*words: object) -> str:
        assert cli.main([str(word) for word in (*asked, *words)]) == 2
        return capsys.readouterr().err

    assert "--engine torch runs in this process alone: leave --ray out" in said(
        "--engine", "torch", "--ray", "auto"
    )
    assert "not on --device cuda" in said("--device", "cuda", "--ray", "auto")
    assert cli.main(["caption", "b", "p", "-o", "out", "--ray", "auto", "--device", "cuda"]) == 2
    assert "--ray decodes on CPUs, not on --device cuda" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
