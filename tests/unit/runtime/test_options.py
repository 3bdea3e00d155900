"""One declaration of options: what follows from it, and what the release before called them."""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from vlmexport.runtime import Session, Typical, cli
from vlmexport.runtime.commands.option_flags import with_flags
from vlmexport.runtime.common.errors import OptionError
from vlmexport.runtime.common.options import Integer, check_options, declared_options, json_schema
from vlmexport.runtime.policy.logistic import LogisticLength
from vlmexport.runtime.session.conversation import Conversation
from vlmexport.runtime.session.options import GenerateOptions
from vlmexport.runtime.session.request_options import RequestOptions, request_options


class MoreOptions(GenerateOptions, total=False):
    """With an option that nothing else knows."""

    dummy: Annotated[
        int, Integer(default=3, low=1, high=9, group="Sampling", metavar="D", help="Does nothing.")
    ]


def test_an_option_is_declared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its line follow the check, the flag of `run` and `bench`, the schema and the line of the reference page."""
    assert check_options(MoreOptions, {})["dummy"] == 3
    for wrong in (0, 10, True, "3", None):
        with pytest.raises(OptionError, match=r"dummy: .* is not an integer in 1\.\.9"):
            check_options(MoreOptions, {"dummy": wrong})

    given: list[Any] = []

    def command(options: MoreOptions) -> None:
        given.append(options)

    run: Any = with_flags(command)
    app = typer.Typer()
    app.command()(run)
    parsed: Any = typer.main.get_command(app)
    (flag,) = [each for each in parsed.params if each.name == "dummy"]
    assert (flag.opts, flag.help, flag.rich_help_panel) == (
        ["--dummy"],
        "Does nothing. Default: 3.",
        "Sampling",
    )
    parsed.main(args=["--dummy", "5"], standalone_mode=False)
    assert given == [{"dummy": 5}], "what was typed, and nothing else"
    schema = json_schema(MoreOptions)["properties"]
    assert schema["dummy"] == {
        "type": "integer", "minimum": 1, "maximum": 9, "default": 3, "description": "Does nothing."
    }  # fmt: skip
    from docs.generate import options as page

    monkeypatch.setattr(page, "GenerateOptions", MoreOptions)
    line = "<code>dummy</code> | <code>--dummy D</code> | Does nothing. Default: 3. |"
    assert line in "".join(page.pages().values())


DECLARATION = """
from __future__ import annotations
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar, Optional, TypedDict
from vlmexport.runtime.common.options import NO_OPTION, Integer, Text
if TYPE_CHECKING:
    from fractions import Fraction

Limit = Annotated[int, Integer(low=1, high=9, help="A limit.")]
Optionals = Optional[Limit]

@dataclass(frozen=True)
class Base:
    _: KW_ONLY
    limit: Limit = 3
    shared: ClassVar[int] = 1

@dataclass(frozen=True, kw_only=True)
class Settings(Base):
    optional: Limit | None = None
    other: Optional["Limit"] = None
    third: Optionals = None
    nearer: Annotated[Limit, Integer(low=4, high=5)] = 4
    derived: Annotated["Fraction | None", NO_OPTION] = None
    required: Limit

class Typed(TypedDict, total=False):
    limit: Limit
    optional: Limit | None

@dataclass
class Plain:
    limit: Limit
    length: int = 3

@dataclass
class Unknown:
    limit: Annotated[Fraction, Integer()] = None

@dataclass
class Several:
    limits: list[Limit] = field(default_factory=list)
"""


@pytest.fixture(scope="module")
def declared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A module with declarations by aliases, whose annotations are strings."""
    file = tmp_path_factory.mktemp("declared") / "declared_by_aliases.py"
    file.write_text(DECLARATION)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[file.stem]


def test_an_alias_declares_an_option(declared: Any) -> None:
    options = declared_options(declared.Settings)
    assert list(options) == ["limit", "optional", "other", "third", "nearer", "required"]
    assert all(isinstance(option, Integer) for option in options.values())
    ranges = {name: (option.low, option.high) for name, option in options.items()}  # type: ignore[attr-defined]
    assert ranges.pop("nearer") == (4, 5) and set(ranges.values()) == {(1, 9)}
    assert [option.default for option in options.values()] == [3, None, None, None, 4, None]
    assert [name for name, option in options.items() if option.required] == ["required"]
    with pytest.raises(OptionError, match=r"--limit: 0 is not an integer in 1\.\.9"):
        options["limit"].check("--limit", 0)
    assert list(declared_options(declared.Typed)) == ["limit", "optional"]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the `type` statement is of Python 3.12")
def test_a_type_statement_declares_an_option(declared: Any) -> None:
    exec("type Lazy = Limit\n@dataclass\nclass WithType:\n    limit: Lazy = 3", vars(declared))
    assert list(declared_options(declared.WithType)) == ["limit"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Plain", r"declared_by_aliases\.Plain\.length: its annotation 'int' has no kind.*NO_OPTION"),
        (
            "Unknown",
            r"declared_by_aliases\.Unknown\.limit: .* cannot be evaluated \(NameError.*TYPE_CHECKING",
        ),
        ("Several", r"declared_by_aliases\.Several\.limits: its annotation 'list\[Limit\]' has no kind"),
    ],
)
def test_a_field_that_declares_nothing_is_an_error(declared: Any, name: str, message: str) -> None:
    owner = getattr(declared, name)
    with pytest.raises(TypeError, match=message):
        declared_options(owner)

    def command(options: Any) -> None:
        raise AssertionError(options)

    command.__annotations__["options"] = owner
    with pytest.raises(TypeError, match=message):
        with_flags(command)


@pytest.mark.parametrize(
    "method", [Session.generate, Session.stream, Session.generate_tokens, Conversation.say]
)
def test_an_editor_completes_the_options(method: Callable[..., Any]) -> None:
    parameters = inspect.signature(method).parameters.values()
    assert len(parameters) - 1 <= 9, "without self"
    named = [each.annotation for each in parameters if each.kind is each.VAR_KEYWORD]
    assert named == ["Unpack[GenerateOptions]"]


def test_every_option_has_a_help_and_a_default_that_it_accepts() -> None:
    for name, option in declared_options(GenerateOptions).items():
        assert option.help.endswith("."), name
        assert option.check(name, option.default) == option.default
    assert RequestOptions().max_new_tokens == 128


def test_a_type_checker_knows_the_options(tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    file = tmp_path / "use.py"
    file.write_text(
        "from vlmexport.runtime import Session\n"
        "def use(session: Session) -> None:\n"
        "    session.generate('a.png', max_new_tokens=3, temperature=0.5)\n"
        "    session.generate('a.png', max_new_token=3)\n"
        "    session.generate('a.png', max_new_tokens='3')\n"
    )
    line = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(file)]
    root = Path(__file__).parents[3]
    said = subprocess.run(line, capture_output=True, text=True, check=False, cwd=root).stdout
    assert [number for number in (3, 4, 5) if f"use.py:{number}:" in said] == [4, 5], said


def deprecated(**options: Any) -> RequestOptions:
    with pytest.warns(DeprecationWarning, match="leaves with the next release"):
        return request_options(options)


def test_options_of_the_release_before_are_translated() -> None:
    assert deprecated(lossy="typical", typical_epsilon=0.1, typical_delta=0.2).lossy == Typical(0.1, 0.2)
    assert deprecated(force_acceptance=0.25).forced_acceptance == 0.25
    with pytest.raises(OptionError, match=r"force_acceptance: 2\.0 is not a number"):
        deprecated(force_acceptance=2.0)
    by_place = deprecated(adaptive="logistic", max_new_tokens=48)
    assert by_place.policy == LogisticLength.of(48, 15) and by_place.adaptive is None
    assert deprecated(adaptive="logistic", draft_length=3).policy is None, "a length that is given wins"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert request_options({"lossy": "typical", "force_acceptance": None}).lossy == Typical()


def test_a_warning_names_the_callers_line(tiny_bundle: Callable[[str], Any]) -> None:
    path = tiny_bundle("llama").path
    with pytest.warns(DeprecationWarning, match="verify_width is deprecated") as seen:
        session = Session.load(path, verify_width=4)
    assert seen[0].filename == __file__ and session.bundle.manifest.verify_width == 4
    with session, pytest.warns(DeprecationWarning, match="force_acceptance is deprecated") as seen:
        result = session.generate(prompt="the cup", max_new_tokens=4, **{"force_acceptance": 0.5})
    assert seen[0].filename == __file__ and result.stats.forced
    with pytest.raises(TypeError, match="'verify_widths'"):
        Session.load(path, verify_widths=4)


def test_a_manifest_that_says_logistic_is_served(tiny_bundle: Callable[[str], Any], monkeypatch: Any) -> None:
    with Session.load(tiny_bundle("llama").path) as session:
        want = session.generate(prompt="the cup", max_new_tokens=16, draft="early-exit").tokens
        monkeypatch.setattr(session.bundle.manifest.policy, "adaptive", "logistic")
        assert session.generate(prompt="the cup", max_new_tokens=16, draft="early-exit").tokens == want


def test_logistic_length_is_a_deprecated_name_of_the_package() -> None:
    import vlmexport.runtime

    with pytest.warns(DeprecationWarning, match="LogisticLength is deprecated"):
        assert vlmexport.runtime.LogisticLength is LogisticLength
    assert "LogisticLength" not in vlmexport.runtime.__all__


def test_flags_of_the_release_before_still_work(
    tiny_bundle: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tiny_bundle("llama").path)
    asked = [
        "--prompt",
        "the cup",
        "--max-new-tokens",
        "8",
        "--draft",
        "early-exit",
        "--temperature",
        "1",
        "--seed",
        "3",
    ]
    old = ["--lossy", "typical", "--typical-epsilon", "0", "--adaptive", "logistic", "--verify-width", "4"]
    capsys.readouterr()
    assert cli.main(["run", path, *asked, *old, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["lossy"] == "typical"
    for flag in ("--typical-epsilon", "--adaptive logistic", "--verify-width"):
        assert f"{flag} is deprecated and leaves with the next release" in said.err
    assert cli.main(["calibrate", path, "--merge", "nowhere"]) == 2
    assert "`vlmexport calibrate` is now `vlmexport tune`" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["run", "bench", "build", "train", "tune"])
def test_a_value_out_of_range_is_named_by_its_flag_or_option(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if command not in cli.RUNTIME_COMMANDS:
        pytest.importorskip("torch", reason="the command needs its extra")
    given = {
        "run": ["nowhere", "--threads", "0"],
        "bench": ["nowhere", "--repeats", "0"],
        "build": ["--model", "x", "-o", "y", "--max-batch", "0"],
        "train": ["--model", "x", "--data", "y", "-o", "z", "--eval-every", "0"],
        "tune": ["nowhere", "--limit", "0"],
    }[command]
    assert cli.main([command, *given]) == 2
    said = capsys.readouterr().err
    assert given[-2] in said and " 0 is " in said and said.count("\n") == 1
