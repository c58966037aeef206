"""Hyperparameter optimisation for PyTorch: parallel Optuna studies over a callback-driven Trainer.

```python
import hpo

result = hpo.run("study.yaml", workers=4)
model = hpo.load_best_model("study.yaml")
```
"""

from typing import TYPE_CHECKING

from trainer.lazy import lazy_names

if TYPE_CHECKING:
    from hpo.api.functions import best_params, load_best_model, load_study, run
    from hpo.api.run_result import RunResult
    from hpo.api.study import Study
    from hpo.api.values import Call, Categorical, Float, Int
    from hpo.errors import HpoError, InputError, StudyError

__version__ = "0.1.0"

__all__ = [
    "Call",
    "Categorical",
    "Float",
    "HpoError",
    "InputError",
    "Int",
    "RunResult",
    "Study",
    "StudyError",
    "best_params",
    "load_best_model",
    "load_study",
    "run",
]

# Imported on first use: every command runs `import hpo`, even `hpo --help`, and it must be fast.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "hpo.api.functions": ("best_params", "load_best_model", "load_study", "run"),
        "hpo.errors": ("HpoError", "InputError", "StudyError"),
        "hpo.api.study": ("Study",),
        "hpo.api.values": ("Call", "Categorical", "Float", "Int"),
        "hpo.api.run_result": ("RunResult",),
    },
)
