"""The runtime stands alone: without torch and friends, importing nothing of the other rooms, quickly."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import vlmexport.runtime
from vlmexport.runtime.common import errors

from tests.support import handmade_bundle

RUNTIME = Path(vlmexport.runtime.__file__).parent
HEAVY = (
    "torch",
    "transformers",
    "onnx",
    "onnxscript",
    "onnx_ir",
    "pydantic",
    "safetensors",
    "accelerate",
    "datasets",
)


def _typer_needs(package: str) -> bool:
    return any(requirement.startswith(package) for requirement in importlib.metadata.requires("typer") or ())


# typer 0.29 parses arguments with pydantic, and installs it; the versions before do not.
HEAVY_OF_CLI = tuple(name for name in HEAVY if not _typer_needs(name))


def python(code: str, *arguments: str, block: Sequence[str] = HEAVY) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter in which none of `block` can be imported."""
    refuse = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in {tuple(block)!r}:
            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)
sys.meta_path.insert(0, Refuse())
"""
    command = [sys.executable, "-c", refuse + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in an installation of the runtime alone."""
    return python("from vlmexport.runtime.cli import main\nsys.exit(main())", *arguments, block=HEAVY_OF_CLI)


def modules() -> list[str]:
    """Every module of the runtime; not the engines of ONNX Runtime where that has no wheels (Python 3.10)."""
    names = (path.relative_to(RUNTIME).with_suffix("").parts for path in RUNTIME.rglob("*.py"))
    found = {".".join(("vlmexport.runtime", *name)).removesuffix(".__init__") for name in names}
    if sys.version_info < (3, 11) and importlib.util.find_spec("onnxruntime") is None:
        found -= {f"vlmexport.runtime.engines.{name}" for name in ("onnxruntime", "onnxruntime_cuda")}
    return sorted(found)


def test_every_error_is_a_name_of_the_package() -> None:
    """A program catches them by name: `from vlmexport.runtime import BusyError`."""
    for name, error in vars(errors).items():
        if isinstance(error, type):
            assert (
                issubclass(error, errors.VlmexportError) and getattr(vlmexport.runtime, name, None) is error
            )
            assert name in vlmexport.runtime.__all__


def test_the_former_module_of_errors_is_deprecated() -> None:
    sys.modules.pop("vlmexport.runtime.errors", None)
    with pytest.warns(DeprecationWarning, match=r"import errors from vlmexport\.runtime$"):
        former = importlib.import_module("vlmexport.runtime.errors")
    assert former.BusyError is errors.BusyError and former.VlmexportError is errors.VlmexportError


def test_blocked_imports_fail() -> None:
    done = python("import torch")
    assert done.returncode != 0
    assert "No module named 'torch'" in done.stderr


def test_every_runtime_module_imports_without_the_heavy_packages() -> None:
    code = f"import importlib\nfor name in {modules()!r}: importlib.import_module(name)\n"
    done = python(code + f"print(sorted(set(sys.modules) & set({HEAVY!r})))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_public_interface_imports_without_the_heavy_packages() -> None:
    done = python("from vlmexport.runtime import Session\nprint(Session.__name__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "Session"


@pytest.mark.parametrize("command", ["run", "bench", "inspect"])
def test_commands_show_their_help_without_the_heavy_packages(command: str) -> None:
    done = cli(command, "--help")
    assert done.returncode == 0, done.stderr
    assert "BUNDLE" in done.stdout


def test_a_command_of_another_room_names_its_extra() -> None:
    done = cli("build", "--model", "x", "-o", "y")
    assert done.returncode == 2
    assert "needs the extra [export]" in done.stderr and "pip install" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    done = cli("train", "--model", "x", "--draft-layer", "1", "--data", "d", "-o", "o")
    assert done.returncode == 2
    assert "needs the extra [train]" in done.stderr and "pip install" in done.stderr


def test_missing_onnx_runtime_names_the_remedy(tmp_path: Path) -> None:
    """Python 3.10, where it has no wheels."""
    folder = handmade_bundle.write_bundle(tmp_path / "bundle", "llama")
    arguments = ["run", str(folder), "--prompt", "hello"]
    code = "from vlmexport.runtime.cli import main\nsys.exit(main())"
    done = python(code, *arguments, block=(*HEAVY_OF_CLI, "onnxruntime"))
    assert done.returncode == 2
    assert "ONNX Runtime is not installed" in done.stderr and "3.11 or newer" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_inspect_works_without_the_heavy_packages(tmp_path: Path) -> None:
    folder = handmade_bundle.write_bundle(tmp_path / "bundle")
    done = cli("inspect", str(folder), "--json", "--check")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["source"] == "handmade"


def _imports(path: Path) -> list[tuple[str, int]]:
    """Absolute names of everything that a file imports, wherever in the file."""
    package = ["vlmexport", "runtime", *path.relative_to(RUNTIME).parent.parts]
    found: list[tuple[str, int]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            found += [(f"{name}.{alias.name}", node.lineno) for alias in node.names]
    return found


def test_the_import_finder_resolves_relative_names() -> None:
    names = [name for name, _ in _imports(RUNTIME / "cli.py")]
    assert "vlmexport.exporter.cli.register" in names
    assert "vlmexport.runtime.common.errors.OptionError" in names


def test_runtime_imports_nothing_of_the_other_rooms() -> None:
    rooms = ("vlmexport.exporter", "vlmexport.calibration")
    allowed = {
        ("cli.py", "vlmexport.exporter.cli.register"),
        ("cli.py", "vlmexport.calibration.cli.register"),
    }
    wrong = [
        f"{path.relative_to(RUNTIME)}:{line} imports {name}"
        for path in RUNTIME.rglob("*.py")
        for name, line in _imports(path)
        if (name.startswith(rooms) or name.partition(".")[0] in HEAVY)
        and (path.relative_to(RUNTIME).as_posix(), name) not in allowed
    ]
    assert wrong == []


def test_nothing_is_unpickled() -> None:
    wrong = [
        f"{path.relative_to(RUNTIME)}:{line} imports {name}"
        for path in RUNTIME.rglob("*.py")
        for name, line in _imports(path)
        if name.partition(".")[0] in ("pickle", "marshal", "shelve", "dill", "joblib")
    ]
    assert wrong == []


def test_help_does_not_import_the_engine() -> None:
    code = "from vlmexport.runtime.cli import main\nmain(['run', '--help'])\n"
    done = python(
        code + "print(sorted(set(sys.modules) & {'onnxruntime', 'PIL', 'tokenizers', 'numpy'}))",
        block=HEAVY_OF_CLI,
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_missing_engine_is_named() -> None:
    code = (
        "from vlmexport.runtime import engines\n"
        "from vlmexport.runtime.common.errors import OptionError\n"
        "try:\n    engines.create(None, 'cpu')\nexcept OptionError as error:\n    print(error)\n"
    )
    done = python(code, block=("onnxruntime",))
    assert done.stdout.startswith("device 'cpu': ONNX Runtime is not installed: pip install onnxruntime")


def test_a_session_on_a_cpu_imports_nothing_of_a_gpu(tmp_path: Path) -> None:
    """Neither the engines on one nor a package of NVIDIA's; no library of its either."""
    pytest.importorskip("onnx", reason="writing the graphs needs [export]")
    pytest.importorskip("onnxruntime")
    from tests.support import handmade_llama

    folder, _ = handmade_llama.write(tmp_path / "bundle")
    code = """
import json, sys
from pathlib import Path
from vlmexport.runtime import Session
with Session.load(sys.argv[1]) as session:
    assert len(session.generate(prompt="the cup", max_new_tokens=6, ignore_eos=True).tokens) == 6
maps = Path("/proc/self/maps")
print(json.dumps([sorted(sys.modules), maps.read_text() if maps.exists() else ""]))
"""
    done = python(code, str(folder))
    assert done.returncode == 0, done.stderr
    modules, loaded = json.loads(done.stdout)
    engines = "vlmexport.runtime.engines."
    assert f"{engines}onnxruntime" in modules
    own = {
        f"{engines}{name}"
        for name in ("cuda", "device", "tensorrt", "tensorrt_library", "onnxruntime_cuda", "appending")
    }
    gpu = {
        "tensorrt",
        "tensorrt_lean",
        "tensorrt_rtx",
        "tensorrt_libs",
        "cuda",
        "pycuda",
        "cupy",
        "nvidia",
        "pynvml",
    }
    assert not own & set(modules)
    assert not [name for name in modules if name.partition(".")[0] in gpu]
    assert not [name for name in ("libcuda.", "libcudart", "libnvinfer") if name in loaded]
