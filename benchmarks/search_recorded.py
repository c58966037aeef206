"""Tasks for search.py: a study's space with curves like those that its trials have had in real training.

    hpo run STUDY.yaml 'study.sampler={name: random}' study.pruner=none callbacks.early_stopping=false \\
        'study.constraints={}' study.n_trials=400
    python benchmarks/search.py run OUT.jsonl --recorded STUDY.yaml --workers 2 --epochs 800 --switch 1.5 --timed

A real study of a minute becomes a simulated one of seconds. A proposal's curve is the mean of Gaussian processes
that scikit-learn fits to the principal components of the recorded curves' logarithms, and on top of it what the
processes leave of a recorded trial nearby: the noise of training, with its size and its course.
"""

import math
import warnings
from functools import cached_property
from pathlib import Path

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.trial import FrozenTrial, TrialState
from search_tasks import Params, Trained, named_rng
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from hpo.config.space import SearchSpace
from hpo.config.spec import load_spec
from hpo.search.schedulers.freeze_thaw.encoding import Encoding

Floats = NDArray[np.float64]

#: How many principal components have their own process; the rest counts as noise.
_COMPONENTS = 6
#: To how many rows the scales of a process are fitted; the process itself uses all rows.
_FITTED = 250
#: A proposal gets the noise of one of this many nearest trials.
_NEIGHBOURS = 8
#: The standard deviation of the logarithm of an epoch's seconds, around the value that the parameters predict.
_UNEVEN = 0.2


class Recorded:
    """A study's space with the curves of its recorded trials.

    Args:
        study: The study file; its storage has complete trials, of which those that ran longest count.
    """

    def __init__(self, study: Path) -> None:
        spec = load_spec(study)
        space = SearchSpace.from_spec(spec)
        self.name = f"recorded-{spec.study.name}"
        self.space, self.conditions = space.distributions, space.conditions
        trials = _whole(optuna.load_study(study_name=spec.study.name, storage=spec.storage_url))
        self.horizon = len(trials[0].intermediate_values)
        self._losses = np.array([list(trial.intermediate_values.values()) for trial in trials])
        self.best, self.median = float(self._losses.min()), float(np.median(self._losses[:, -1]))
        self._encoding = Encoding(self.space, self.conditions)
        self._rows = self._encoding.features(self._encoding.points([trial.params for trial in trials]))
        self._durations = [trial.duration.total_seconds() for trial in trials if trial.duration is not None]

    def train(self, params: Params, seed: int) -> Trained:
        """See `Task`; the observed losses count, as in a real study."""
        at = self._encoding.features(self._encoding.point(params)[None])
        rng = named_rng(self.name, seed, sorted(params.items()))
        near = np.argsort(((self._rows - at) ** 2) @ self._relevance)[:_NEIGHBOURS]
        seen = np.exp(self._expected(at)[0] + self._rest[rng.choice(near)])
        seconds = self._slowness(at)[0] * math.exp(_UNEVEN * rng.normal())
        return Trained(seen, seen, float(seconds))

    def _expected(self, at: Floats) -> Floats:
        scores = np.stack([process.predict(at) for process in self._processes], axis=1)
        return np.asarray(self._mean + scores @ self._basis)

    def _slowness(self, at: Floats) -> Floats:
        """An epoch's seconds, as a multiple of the median trial's."""
        return np.asarray(np.exp(at @ self._time[1:] + self._time[0]))

    @cached_property
    def _time(self) -> Floats:
        """A ridge regression of the logarithm, shifted to a median of 0: the constant and the columns' weights."""
        rows, logs = self._rows - self._rows.mean(0), np.log(self._durations)
        weights = np.linalg.solve(rows.T @ rows + np.eye(rows.shape[1]), rows.T @ (logs - logs.mean()))
        return np.concatenate([[-np.median(self._rows @ weights)], weights])

    @cached_property
    def _mean(self) -> Floats:
        return np.asarray(np.log(self._losses).mean(0))

    @cached_property
    def _basis(self) -> Floats:
        return np.linalg.svd(np.log(self._losses) - self._mean, full_matrices=False)[2][:_COMPONENTS]

    @cached_property
    def _rest(self) -> Floats:
        """The part of each recorded curve that the processes don't explain."""
        return np.log(self._losses) - self._expected(self._rows)

    @cached_property
    def _relevance(self) -> Floats:
        """How much each column determines the first component."""
        return np.asarray(self._processes[0].kernel_.k1.k2.length_scale ** -2.0)

    @cached_property
    def _processes(self) -> list[GaussianProcessRegressor]:
        scores = (np.log(self._losses) - self._mean) @ self._basis.T
        return [_process(self._rows, column) for column in scores.T]


def _whole(study: optuna.Study) -> list[FrozenTrial]:
    """The complete trials with the most epochs, all of which have finite values."""
    trials = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    sound = [trial for trial in trials if np.isfinite(list(trial.intermediate_values.values())).all()]
    longest = max(len(trial.intermediate_values) for trial in sound)
    return [trial for trial in sound if len(trial.intermediate_values) == longest]


def _process(rows: Floats, values: Floats) -> GaussianProcessRegressor:
    columns = rows.shape[1]
    lengths = Matern(np.full(columns, math.sqrt(columns)), (0.3, 1e2), nu=2.5)
    kernel = ConstantKernel(1.0, (1e-3, 1e3)) * lengths + WhiteKernel(0.1, (1e-3, 1.0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # irrelevant columns have scales at the bound
        found = GaussianProcessRegressor(kernel, normalize_y=True).fit(rows[:_FITTED], values[:_FITTED])
    return GaussianProcessRegressor(found.kernel_, optimizer=None, normalize_y=True).fit(rows, values)
