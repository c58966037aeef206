"""An option or argument whose value does not fit: what is said of it."""

from __future__ import annotations

import pytest

from tests.support.commands import hpo

pytestmark = pytest.mark.full


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            ("run", "study.yaml", "--workers", "0"),
            "'--workers': must be at least 1\n  value: 0\n  fix: write 1 or more\n",
        ),
        (
            ("run", "study.yaml", "--n-trials=1.5"),
            "'--n-trials': must be a whole number\n  value: 1.5\n  fix: write a whole number\n",
        ),
        (
            ("logs", "study.yaml", "-1", "--follow"),
            "'TRIAL': must be at least 0\n  value: -1\n  fix: write 0 or more\n",
        ),
        (
            ("status", "study.yaml", "--watch", "--interval", "often"),
            "'--interval': must be a number\n  value: often\n  fix: write a number\n",
        ),
        (
            ("dashboard", "study.yaml", "--port", "70000"),
            "'--port': must be at most 65535\n  value: 70000\n  fix: write 65535 or less\n",
        ),
        (
            ("export", "study.yaml", "--format", "xlsx"),
            "'--format': is not one of its values\n  value: xlsx\n  fix: choose from: csv, parquet, json\n",
        ),
        (
            ("export", "study.yaml", "--format", "parqet"),
            "value: parqet\n  fix: did you mean `parquet`? choose from: csv, parquet, json\n",
        ),
    ],
)
def test_a_value_that_does_not_fit_is_said_with_a_fix(command: tuple[str, ...], said: str) -> None:
    assert hpo(*command, code=2).stderr.endswith(said)
