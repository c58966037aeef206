"""The record of a study's code, stored with the study: its present code, and each change that a person accepted.

The ledger has the hash of the worker's code for every attempt, so each trial's code is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final, Self

import optuna
from optuna.trial import FrozenTrial

from hpo.config.code import CodeIdentity
from hpo.config.spec import StudySpec
from hpo.storage.attributes import CODE_ATTR
from hpo.storage.ledger import Attempt
from hpo.storage.optuna_private import id_of_trial
from hpo.storage.study_storage import StudyStorage

_LISTED: Final = 20


@dataclass(frozen=True)
class CodeVersion:
    """A version of a study's code.

    Attributes:
        hash: Its hash.
        since: When the study began to use it, ISO 8601, UTC.
        changed: The differences from the version before, one line each; empty for the first version.
    """

    hash: str
    since: str
    changed: Sequence[str] = ()


@dataclass(frozen=True)
class CodeRecord:
    """What is stored about a study's code.

    Attributes:
        files: A hash for each module of the study's present code; see `CodeIdentity`.
        versions: All versions that the study has had, the present one last.
    """

    files: Mapping[str, str]
    versions: Sequence[CodeVersion]

    @classmethod
    def of(cls, attrs: Mapping[str, Any]) -> Self | None:
        """The record in a study's user attributes; None where there is none."""
        stored: dict[str, Any] | None = attrs.get(CODE_ATTR)
        if stored is None:
            return None
        return cls(stored["files"], [CodeVersion(**version) for version in stored["versions"]])

    @property
    def hash(self) -> str:
        """The hash of the study's present code."""
        return self.versions[-1].hash


def keep_code(study: optuna.Study, code: CodeIdentity, before: CodeRecord | None = None) -> None:
    """Store the code that the study has from now on, as a further version of the record ``before``."""
    changed = code.changes_since(before.files) if before else []
    version = CodeVersion(code.hash, datetime.now(UTC).isoformat(timespec="seconds"), changed)
    record = CodeRecord(code.files, [*(before.versions if before else ()), version])
    study.set_user_attr(CODE_ATTR, asdict(record))


def code_problem(record: CodeRecord | None, code: CodeIdentity) -> str:
    """How the code here differs from the study's, naming the files; empty if it does not, or none is recorded."""
    if record is None or code.hash == record.hash:
        return ""
    changes = code.changes_since(record.files)
    lines = "".join(f"\n    {line}" for line in changes[:_LISTED])
    more = f"\n    and {len(changes) - _LISTED} more" if len(changes) > _LISTED else ""
    return f"the study's code is {record.hash}, and the code here is {code.hash}:{lines}{more}"


def code_fix(spec: StudySpec) -> str:
    """The fix for code that differs from the study's."""
    return (
        f"undo the change, give the new study its own name (`study.name={spec.study.name}-2`), or accept the "
        "change with `hpo run --accept-code-change` (in Python `accept_code_change=True`)"
    )


def trial_codes(storage: StudyStorage, trial: FrozenTrial) -> list[str]:
    """The hashes of the code that a trial ran under, the latest last; several if it resumed under other code."""
    return codes_of(storage.attempts_of_trial(id_of_trial(trial)))


def codes_of(attempts: Iterable[Attempt]) -> list[str]:
    """The hashes of the code that attempts ran under, each once, the first one first."""
    return list(dict.fromkeys(each.code for each in attempts if each.code))
