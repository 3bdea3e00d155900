"""The command line: exit codes, one-line errors, JSON on stdout alone, rooms mounted only when asked for."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import re
import signal
import subprocess
import sys
import time
import types
import weakref
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import typer
from PIL import Image
from vlmexport.runtime import cli
from vlmexport.runtime.commands import suggestions
from vlmexport.runtime.common import optional_deps
from vlmexport.runtime.common.errors import ExportError, ImageError
from vlmexport.runtime.common.optional_deps import install_command

from tests.support import handmade_bundle

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Signals as a terminal has them: a shell starts its background jobs with Ctrl-C ignored, and so it stays then."""
    before = {number: signal.signal(number, usual) for number, usual in cli.STOPPING.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_version(capsys: Capture) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"vlmexport {version('vlmexport')}\n"


def test_help_lists_every_command(capsys: Capture) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in (*cli.RUNTIME_COMMANDS, *cli.MOUNTED_COMMANDS):
        assert f" {name} " in shown


def test_the_package_is_a_module_with_a_version_and_the_session() -> None:
    code = (
        "import sys, vlmexport\nloaded = [name for name in sys.modules if name.startswith('vlmexport.')]\n"
        "from vlmexport import Session\nfrom vlmexport.runtime import Session as same\n"
        "print(vlmexport.__version__, loaded, Session is same)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{version('vlmexport')} [] True\n"
    done = subprocess.run([sys.executable, "-m", "vlmexport", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"vlmexport {version('vlmexport')}\n")


@pytest.mark.parametrize(
    ("line", "word", "offered"),
    [
        ("vlmexport ru", 1, "run"),
        ("vlmexport run --max-l", 2, "--max-length"),
        ("vlmexport inspect --js", 2, "--json"),
    ],
)
def test_a_shell_completes_commands_and_their_options(
    line: str, word: int, offered: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setenv("_VLMEXPORT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(word))
    with contextlib.suppress(SystemExit):
        cli.main([])
    assert offered in capsys.readouterr().out.split()


@pytest.mark.parametrize(
    "arguments", [["bulid"], ["inspect"], ["inspect", "--no-such"], ["inspect", "a", "b"], ["--no-such"]]
)
def test_wrong_use_is_status_2_with_a_hint(arguments: list[str], capsys: Capture) -> None:
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "Error" in shown.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        *(([word], f"{word}: {said}") for word, said in suggestions.WORDS.items()),
        *(
            (["bench", "b", f"--{word}"], f"--{word}: {said}")
            for word, said in suggestions.WORDS.items()
            if word not in ("i", "help")
        ),
        (["run", "b", "-i", "x.png"], "-i: `--image FILE`, once for each picture"),
        (["run", "b", "--images=x.png"], "--images: `--image FILE`, once for each picture"),
        (["run", "b", "x.png"], "x.png: a picture is given by its option: --image x.png"),
        (
            ["bench", "b", "x.JPG", "y.png"],
            "x.JPG y.png: a picture is given by its option: --image x.JPG --image y.png",
        ),
    ],
)
def test_options_of_other_tools_get_suggestions(arguments: list[str], said: str, capsys: Capture) -> None:
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", f"vlmexport: {said}\n")


@pytest.mark.parametrize(
    "arguments", [["run", "b", "words"], ["inspect", "b", "x.png"], ["rnu"], ["run", "--imag"]]
)
def test_unknown_options_get_the_usual_error(arguments: list[str], capsys: Capture) -> None:
    assert cli.main(arguments) == 2
    assert "Error: " in capsys.readouterr().err


def test_every_suggestion_names_an_existing_option() -> None:
    """Commands, and options of a command; and no word is one of ours."""
    for word, said in suggestions.WORDS.items():
        assert word not in cli.RUNTIME_COMMANDS and word not in cli.MOUNTED_COMMANDS
        for quoted in re.findall(r"`(?:vlmexport )?([^`]*)`", said):
            command, *rest = quoted.split()
            named = [each for each in rest if each.startswith("--")]
            if (
                command not in {**cli.RUNTIME_COMMANDS, **cli.MOUNTED_COMMANDS}
                or command in cli.MOUNTED_COMMANDS
            ):
                continue
            found = typer.main.get_command(cli.build_app(command)).commands[command]  # type: ignore[attr-defined]
            assert set(named) <= {"--help", *(flag for option in found.params for flag in option.opts)}, (
                quoted
            )


@pytest.mark.parametrize("name", ["bundle", "deployed"])
@pytest.mark.parametrize("command", ["run", "bench", "inspect", "profile"])
def test_folder_with_a_bundle_inside_is_suggested(
    tmp_path: Path, capsys: Capture, command: str, name: str
) -> None:
    handmade_bundle.write_bundle(tmp_path / "demo" / name)
    assert cli.main([command, str(tmp_path / "demo")]) == 2
    said = f"holds no manifest.json, so it is not a bundle; give {tmp_path / 'demo' / name}\n"
    assert capsys.readouterr().err == f"vlmexport: {tmp_path / 'demo'}: {said}"
    assert cli.main([command, str(tmp_path)]) == 2
    assert "give the folder that `vlmexport build -o` wrote" in capsys.readouterr().err


def test_an_error_is_one_line_on_stderr(tmp_path: Path, capsys: Capture) -> None:
    assert cli.main(["inspect", str(tmp_path), "--json"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("vlmexport: ")
    assert shown.err.count("\n") == 1


def test_inspect_says_what_is_in_the_bundle(tmp_path: Path, capsys: Capture) -> None:
    folder = handmade_bundle.write_bundle(tmp_path / "bundle")
    assert cli.main(["inspect", str(folder)]) == 0
    shown = capsys.readouterr().out
    for text in ("handmade", "segment.0", "imitation@1", "128 B per token", "cut at 1", "describe the scene"):
        assert text in shown


def test_inspect_check_reads_every_byte(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = handmade_bundle.write_bundle(tmp_path / "bundle")
    monkeypatch.setattr("vlmexport.runtime.bundle.folder.SMALL", 0)
    weights = bytearray((folder / "weights.bin").read_bytes())
    weights[7] ^= 1
    (folder / "weights.bin").write_bytes(weights)
    assert cli.main(["inspect", str(folder)]) == 0
    assert cli.main(["inspect", str(folder), "--check"]) == 2
    assert "weights.bin: SHA-256" in capsys.readouterr().err


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Stands in for the exporter's command line."""
    module = types.ModuleType("vlmexport.exporter.cli")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def build(model: str = typer.Option(...)) -> None:
        actions[model]()

    def verify() -> None:
        raise AssertionError("not asked for")

    def register(app: typer.Typer) -> None:
        app.command("build")(build)
        app.command()(verify)

    def fail() -> None:
        raise ExportError("cannot export\nthis\x1b[2J\0")

    def interrupt() -> None:
        raise KeyboardInterrupt

    def signalled(number: int) -> None:
        signal.raise_signal(number)
        raise AssertionError("the signal was lost")

    def in_a_callback() -> None:
        """Python drops what a weak reference's callback raises."""
        owner = type("Owner", (), {})()
        weakref.finalize(owner, signal.raise_signal, signal.SIGINT).atexit = False
        del owner
        time.sleep(0.05)
        raise AssertionError("Ctrl-C was lost")

    def swallowed() -> None:
        """A library makes another error out of it."""
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise RuntimeError("import failed") from None

    def leave() -> None:
        raise typer.Exit(1)

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def no_memory() -> None:
        raise MemoryError

    def memory() -> None:
        raise MemoryError("8 TiB asked for")

    def need(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    actions = {
        "good": lambda: print("built"), "full": full, "memory": memory, "no memory": no_memory, "fail": fail, "interrupt": interrupt, "leave": leave,
        "torch": lambda: need("torch.nn"), "plot": lambda: need("matplotlib"), "bug": lambda: need("numpyy"),
        "ctrl-c": lambda: signalled(signal.SIGINT), "term": lambda: signalled(signal.SIGTERM),
        "in a callback": in_a_callback, "swallowed": swallowed,
    }  # fmt: skip
    module.register = register  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize(
    ("model", "status", "message"),
    [
        ("good", 0, ""),
        ("fail", 2, "vlmexport: cannot export this?[2J?\n"),
        ("interrupt", 130, "\nInterrupted.\n"),
        ("ctrl-c", 130, "\nInterrupted.\n"),
        ("term", 143, "\nInterrupted.\n"),
        ("in a callback", 130, "\nInterrupted.\n"),
        ("swallowed", 130, "\nInterrupted.\n"),
        ("leave", 1, ""),
        ("full", 2, "vlmexport: the output: No space left on device\n"),
        ("memory", 2, "vlmexport: not enough memory (8 TiB asked for); use a smaller model or smaller limits\n"),
        ("no memory", 2, "vlmexport: not enough memory; use a smaller model or smaller limits\n"),
        ("torch", 2, "vlmexport: `vlmexport build` needs the extra [export] (torch is missing): "
                     f"{install_command('export')}\n"),
        ("plot", 2, "vlmexport: `vlmexport build` needs the extra [eval] (matplotlib is missing): "
                    f"{install_command('eval')}\n"),
    ],
)  # fmt: skip
def test_mounted_commands(
    exporter: types.ModuleType, interruptible: None, capsys: Capture, model: str, status: int, message: str
) -> None:
    assert cli.main(["build", "--model", model]) == status
    shown = capsys.readouterr()
    assert shown.err.lstrip("\r") == message
    assert shown.out == ("built\n" if model == "good" else "")


@pytest.mark.parametrize(
    "closed", [("stdin",), ("stderr",), ("stdin", "stderr"), ("stdout",), ("stdin", "stdout", "stderr")]
)
def test_closed_streams(
    closed: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for name in closed:
        monkeypatch.setattr(sys, name, None)
    # Results that nobody can read are not lost without a word.
    lost = "stdout" in closed
    for command in ([], ["--json"]):
        found = cli.main(
            ["inspect", str(handmade_bundle.write_bundle(tmp_path / "bundle" / str(len(command)))), *command]
        )
        assert found == (2 if lost else 0)
    assert cli.main(["inspect", str(tmp_path / "nowhere")]) == 2
    if closed == ("stdout",):
        said = "vlmexport: standard output: is closed; lead it to a file, or to /dev/null"
        assert capsys.readouterr().err.splitlines()[:2] == [said, said]


@pytest.mark.parametrize("columns", ["0", "1", "9", "abc", "-3", "\u00b2", "", "9" * 30])
def test_invalid_terminal_size_hides_nothing(
    columns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    folder = str(handmade_bundle.write_bundle(tmp_path / "bundle"))
    for name in ("COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    assert cli.main(["inspect", folder]) == 0
    right = capsys.readouterr().out
    for name in ("COLUMNS", "LINES"):
        monkeypatch.setenv(name, columns)
    assert cli.main(["inspect", folder]) == 0
    assert capsys.readouterr().out == right
    monkeypatch.setenv("COLUMNS", columns)
    assert cli.main(["--help"]) == 0


@pytest.mark.parametrize(
    ("line", "option"),
    [
        (["run", "b", "--image", ""], "--image"), (["run", "b", "--video", ""], "--video"), (["inspect", ""], "BUNDLE"),
        (["bench", "b", "--plot", ""], "--plot"), (["run", "b", "--kernel-cache", ""], "--kernel-cache"),
        (["run", "b", "--image", "a.png", "--image", ""], "--image"),
    ],
)  # fmt: skip
def test_an_empty_path_is_not_the_current_folder(line: list[str], option: str, capsys: Capture) -> None:
    assert cli.main(line) == 2
    assert capsys.readouterr().err == f"vlmexport: {option}: the path is empty; name a file or folder\n"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("ImportError('lib.so: cannot map\\nmore', name='onnxruntime')", "onnxruntime cannot be loaded: lib.so: cannot map"),
        ("ImportError()", "a library cannot be loaded: ImportError"),
        ("OSError(12, 'Cannot allocate memory')", "not enough memory ([Errno 12] Cannot allocate memory); use a smaller"),
        ("OSError(36, 'File name too long', 'a' * 5000)", "vlmexport: " + "a" * 200 + "…: File name too long"),
    ],
)  # fmt: skip
def test_unloadable_bundle_is_one_line(
    error: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    from vlmexport.runtime.bundle.folder import Bundle

    def failing(*_: object, **__: object) -> None:
        raise eval(error)

    monkeypatch.setattr(Bundle, "open", failing)
    assert cli.main(["inspect", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert said in shown and len(shown.splitlines()) == 1


def test_repeated_commands_leak_nothing(tmp_path: Path) -> None:
    def handlers() -> list[int]:
        return [len(logging.getLogger(name).handlers) for name in (None, "PIL", "vlmexport")]

    folder = handmade_bundle.write_bundle(tmp_path / "bundle")
    assert cli.main(["inspect", str(folder)]) == 0
    before = handlers()
    assert cli.main(["inspect", str(folder)]) == cli.main(["inspect", str(folder)]) == 0
    assert handlers() == before


def test_missing_modules_of_extras_are_named() -> None:
    for modules in optional_deps.MODULES.values():
        for module in modules:
            error = cli.missing_extra(ModuleNotFoundError(module, name=f"{module}.inner"))
            least = next(name for name, listed in optional_deps.MODULES.items() if module in listed)
            assert f"the extra [{least}] ({module} is missing)" in str(error)


def test_internal_errors_keep_their_traceback(exporter: types.ModuleType) -> None:
    with pytest.raises(ModuleNotFoundError, match="numpyy"):
        cli.main(["build", "--model", "bug"])


def test_top_level_help_imports_no_other_package(exporter: types.ModuleType, capsys: Capture) -> None:
    del exporter.register
    assert cli.main(["--help"]) == 0
    assert cli.main(["inspect", "--help"]) == 0


def test_missing_command_of_a_package_is_reported(exporter: types.ModuleType, capsys: Capture) -> None:
    assert cli.main(["models", "--anything"]) == 2
    assert "not part of this installation" in capsys.readouterr().err


def test_json_is_one_object_and_nothing_else(tmp_path: Path, capsys: Capture) -> None:
    folder = handmade_bundle.write_bundle(tmp_path / "bundle")
    assert cli.main(["inspect", str(folder), "--json", "--check"]) == 0
    shown = capsys.readouterr()
    assert isinstance(json.loads(shown.out), dict)
    assert shown.err == ""


@pytest.mark.parametrize("command", sorted({**cli.RUNTIME_COMMANDS, **cli.MOUNTED_COMMANDS}))
def test_a_command_has_one_help_text(command: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    if command in cli.MOUNTED_COMMANDS:
        pytest.importorskip("torch", reason="the command needs its extra")
    monkeypatch.setenv("COLUMNS", "200")
    text = {**cli.RUNTIME_COMMANDS, **cli.MOUNTED_COMMANDS}[command][1]
    for arguments in (["--help"], [command, "--help"]):
        assert cli.main(arguments) == 0
        shown = capsys.readouterr().out
        assert text in " ".join(shown.replace("│", " ").split()), arguments
        assert {"-v", "--verbose", "-q", "--quiet"} <= set(shown.split()), arguments


def test_first_picture_of_a_folder_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    from vlmexport.runtime.commands import each

    for number in range(3):
        synthetic = np.full((8, 8, 3), 40 * number, np.uint8)
        Image.fromarray(synthetic).save(tmp_path / f"{number}.png")
    (tmp_path / "0.png").write_bytes(b"damaged")
    files = each.the_folder([tmp_path], alone=True)
    assert files is not None
    read: list[Path] = []
    before = each.read_picture
    monkeypatch.setattr(each, "read_picture", lambda path: read.append(path) or before(path))
    known = each.first_readable(files)
    assert known[0] == tmp_path / "1.png"
    session = types.SimpleNamespace(
        generate=lambda image, *_, **__: types.SimpleNamespace(
            text=str(image.getpixel((0, 0))), stats=None, lossy=None
        )
    )
    monkeypatch.setattr("vlmexport.runtime.commands.run_report.summary", lambda _: "")
    with pytest.raises(ImageError, match="1 of 3 pictures could not be answered"):
        each.answer_each(session, files, None, {}, None, known)  # type: ignore[arg-type]
    assert capsys.readouterr().out == "1.png\t(40, 40, 40)\n2.png\t(80, 80, 80)\n"
    assert [path.name for path in read] == ["0.png", "1.png", "0.png", "2.png"], (
        "what was read is not read again"
    )
    with pytest.raises(ImageError, match=r"0\.png"):
        each.first_readable(files[:1])
