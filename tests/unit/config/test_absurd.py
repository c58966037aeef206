"""Study files that no person writes: refused at their line, in little memory, and nothing is written."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from hpo.config.spec import load_spec
from hpo.config.yaml_loader import MAX_DEPTH, MAX_VALUES
from hpo.config.yaml_source import MAX_BYTES, read_yaml
from hpo.errors import InputError
from tests.support.commands import STUDY, hpo, make_study

pytestmark = pytest.mark.full

#: More than any error here takes up.
MEBIBYTE = 2**20
ROOM = 100 * MEBIBYTE


def lines(*, levels: int, parts: int, line: str) -> str:
    """Lines of which each names the one before several times."""
    return "".join(line.format(n, ", ".join([f"*a{n - 1}"] * parts)) for n in range(1, levels))


#: What is written after the study, or in its place; and how the error continues after the file.
FILES = {
    "laughs": ("x0: &a0 [lol]\n" + lines(levels=30, parts=10, line="x{0}: &a{0} [{1}]\n"), "x4"),
    "merged laughs": ("x0: &a0 {a: 1}\n" + lines(levels=30, parts=10, line="x{0}: &a{0} {{<<: [{1}]}}\n"), "x4"),
    "a chain of aliases": ("x0: &a0 [x]\n" + lines(levels=400, parts=1, line="x{0}: &a{0} [{1}]\n"), "x49"),
    "brackets": ("x: " + "[" * 10_000 + "]" * 10_000, "is nested deeper than 50 levels"),
    "brackets that stay open": ("x: " + "[" * 10_000, "is nested deeper than 50 levels"),
    "braces": ("x: " + "{a: " * 10_000 + "}" * 10_000, "is nested deeper than 50 levels"),
    "dashes": ("x:\n  " + "- " * 10_000 + "x", "is nested deeper than 50 levels"),
    "indentation": ("".join(" " * n + "x:\n" for n in range(500)), "is nested deeper than 50 levels"),
    "a long list": ("x: [" + "1, " * 20_000 + "1]", "holds more than 10,000 keys and values"),
    "a huge file": ("# " + "x" * 3 * MEBIBYTE, "is larger than 512 KiB"),
    "digits": (f"x: 1{'0' * 5_000}", "x: does not fit its YAML tag"),
    "hexadecimal digits": (f"x: 0x1{'0' * 100_000}", "x: is too large for a whole number"),
    "a number without digits": ("x: !!int ''", "x: does not fit its YAML tag"),
    "a sign without digits": ("x: !!int '-'", "x: does not fit its YAML tag"),
    "a float without digits": ("x: !!float ''", "x: does not fit its YAML tag"),
    "an escape of 32 bits": (
        r'x: "\UFFFFFFFF"',
        "not YAML: while scanning a quoted scalar found an escape that is no",
    ),
    "an escape above all": (
        r'x: "\U00110000"',
        "not YAML: while scanning a quoted scalar found an escape that is no",
    ),
    "a long key": (f"{'k' * 900}: 1", "a key has more than 256 characters"),
    "a NUL": ("x: a\0b", "not YAML: the character U+0000 is not allowed"),
    "text of another encoding": (b"x: \xff\xfe", "is not UTF-8 text"),
    "a surrogate that is no character": (b"x: \xed\xa0\x80", "is not UTF-8 text"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_would_fill_memory_or_stack(name: str, tmp_path: Path) -> None:
    text, said = FILES[name]
    path = make_study(tmp_path)
    path.write_bytes(path.read_bytes() + (text if isinstance(text, bytes) else text.encode()))
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as raised:
            load_spec(path)
        assert tracemalloc.get_traced_memory()[1] < ROOM
    finally:
        tracemalloc.stop()
    error = raised.value
    assert error.line is not None
    assert f"{error.path}: {error.problem}".removeprefix(": ").startswith(said)
    assert error.fix
    assert max(map(len, str(error).splitlines())) < 500


@pytest.mark.parametrize("name", ["laughs", "brackets", "a huge file", "a NUL"])
@pytest.mark.parametrize("command", ["run", "check"])
def test_it_ends_a_command_with_2_and_leaves_nothing(name: str, command: str, tmp_path: Path) -> None:
    path = make_study(tmp_path)
    path.write_text(path.read_text() + str(FILES[name][0]))
    before = sorted(tmp_path.iterdir())
    result = hpo(command, path, code=2)
    said = result.stderr + result.stdout
    assert f"{path}:" in said
    assert "fix: " in said
    assert "Traceback" not in said
    assert sorted(tmp_path.iterdir()) == before


OVERRIDES = {
    "study.name=" + "n" * 300: "study.name: has 300 characters",
    "study.n_trials=1" + "0" * 400: "study.n_trials: is too large for a whole number",
    "run.workers=1000000000": "run.workers: must be at most 1024",
    "model." + "h" * 400 + "=1": "a path has at most",
    "a" + ".a" * 100 + "=1": "a path has at most",
    "model.hidden[" + "9" * 5_000 + "]=1": "a path has at most",
    "model.hidden=" + "[" * 5_000: "model.hidden: is nested deeper than 50 levels",
    "model.hidden=" + "${" * 500 + "}" * 500: "model.hidden: has more than 5 `${` inside one another",
    "model.hidden=!!int '-'": "model.hidden: does not fit its YAML tag",
    "optimizer.lr=1e400": "optimizer.lr: is too large for a floating-point number",
    "search_space[" + "p" * 600 + "].low=1": "a path has at most",
    "run.output_dir=" + "o" * 300: "run.output_dir: is too long",
}


@pytest.mark.parametrize("number", range(len(OVERRIDES)))
def test_an_override_is_held_to_the_same(number: int, tmp_path: Path) -> None:
    override, said = list(OVERRIDES.items())[number]
    path = make_study(tmp_path)
    before = sorted(tmp_path.iterdir())
    result = hpo("run", path, override, code=2)
    assert result.stderr.startswith(f"command line: {said}")
    assert "fix: " in result.stderr
    assert max(map(len, result.stderr.splitlines())) < 500
    assert sorted(tmp_path.iterdir()) == before


def test_what_a_study_may_well_hold_is_let_pass(tmp_path: Path) -> None:
    many = ", ".join(str(n) for n in range(MAX_VALUES - 300))
    deep = "[" * (MAX_DEPTH - 5) + "]" * (MAX_DEPTH - 5)
    model = f"hidden: 4, large: .inf, seed: {2**63 - 1}, path: {'p' * 2_000}, {'k' * 256}: 1, deep: {deep}"
    text = STUDY.replace("hidden: 4", model).replace("name: tiny", f"name: {'n' * 200}")
    spec = load_spec(make_study(tmp_path, text + f"callbacks: {{own: {{_target_: a.b, items: [{many}]}}}}\n"))
    assert len(spec.base_config()["callbacks"]["own"]["items"]) == MAX_VALUES - 300
    assert spec.resolve()["model"]["large"] == float("inf")
    text = "\ufeff" + STUDY + "# " + "x" * (MAX_BYTES - 2_000)
    assert load_spec(make_study(tmp_path, text)).study.name == "tiny"


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ("studi.yaml", "did you mean `{folder}/study.yaml`?"),
        ("", "did you mean `{folder}/study.yaml`?"),
        ("wholly-other", "check the path, or the folder you are in"),
        ("nowhere/study.yaml", "check the path, or the folder you are in"),
    ],
)
def test_a_path_that_is_no_file_is_answered_with_one_that_is(tmp_path: Path, given: str, fix: str) -> None:
    for name in ("study.yaml", "compose.yml"):
        (tmp_path / name).write_text("study: {}\n")
    with pytest.raises(InputError) as caught:
        read_yaml(tmp_path / given)
    assert caught.value.fix == fix.format(folder=tmp_path)


def test_the_only_file_of_a_folder_is_the_one_that_is_meant(tmp_path: Path) -> None:
    (tmp_path / "digits.yml").write_text("study: {}\n")
    with pytest.raises(InputError, match=r"no such file") as caught:
        read_yaml(tmp_path / "study.yaml")
    assert caught.value.fix == f"did you mean `{tmp_path}/digits.yml`?"
