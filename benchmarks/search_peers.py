"""Other projects' searches as strategies of search.py: the same simulated study, the same budget of epochs.

The project does not depend on them. Install those that you want to compare with, in an environment of their own:

    pip install optunahub cmaes                # auto_sampler: OptunaHub's, with a pruner behind a `+` or none
    pip install smac "scikit-learn<1.7"        # smac: whole trials; smac_hyperband: its multi-fidelity facade
    pip install ax-platform                    # ax: whole trials
    pip install syne-tune huggingface_hub      # bohb, ashacqr: these stop trials for good
    pip install --no-deps HEBO                 # hebo: whole trials; beside Ax, which brings what it needs
    pip install gpytorch scikit-learn          # dyhpo, dpl: see search_pool_peers.py

AutoSampler is read from the folder that HPO_HUB_REGISTRY names, a clone of optuna/optunahub-registry; without it
from the public registry. DyHPO and DPL are no packages: HPO_DYHPO and HPO_DPL name folders with clones of
releaunifreiburg/DyHPO and releaunifreiburg/DPL. Each peer has its own defaults. SMAC and AutoSampler know which
parameters depend on others; HEBO, Ax and Syne Tune draw all of them, and those that do not apply are left out.
SMAC's Hyperband asks for the same configuration with a larger budget: here it resumes, so that no epoch is trained
twice.
"""

import logging
import math
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from search_pool_peers import DPL, DyHPO, Pool
from search_study import Plan, Running, Sampled, Strategy
from search_tasks import Params, Task

from hpo.search.schedulers.freeze_thaw.encoding import Encoding

#: Trials that SMAC's Hyperband expects for each whole training of the budget; its first design is a quarter.
_HYPERBAND_TRIALS: Final = 5


def _applicable(task: Task, params: Params) -> Params:
    encoding = Encoding(task.space, task.conditions)
    return encoding.params(encoding.snap(encoding.point(params)[None])[0])


def _alone(name: str, pruner: str) -> None:
    if pruner:
        raise SystemExit(f"{name} knows no trials that a pruner has stopped: leave `+{pruner}` out")


class Asked(ABC):
    """A peer that proposes points, and gets the best loss of each whole trial."""

    def __init__(self, task: Task, plan: Plan) -> None:
        self._task, self._plan = task, plan
        self._asked: dict[int, Any] = {}
        self._worst = 0.0
        self.granted: tuple[int | None, str] = (None, "")

    def free(self, trials: Sequence[Running], here: int | None) -> tuple[int | None, Params] | None:  # noqa: ARG002
        """See `Strategy`."""
        if self._plan.trials is not None and len(trials) >= self._plan.trials:
            return None
        found = self._ask()
        if found is None:
            return None
        self._asked[len(trials)], params = found
        return None, _applicable(self._task, params)

    def report(self, trial: Running, value: float) -> bool:
        """See `Strategy`; a diverged trial counts like the worst one."""
        if math.isfinite(value) and trial.done < self._task.horizon:
            return True
        trial.state = "ended"
        best = min(trial.values.values())
        self._worst = max(self._worst, best if math.isfinite(best) else 0.0)
        self._tell(self._asked[trial.number], best if math.isfinite(value) else self._worst)
        return False

    @abstractmethod
    def _ask(self) -> tuple[Any, Params] | None:
        """A key for `_tell` and new parameters; None if the peer has none now."""

    @abstractmethod
    def _tell(self, asked: Any, loss: float) -> None:
        """Give the peer the best loss of a point that it proposed."""


class Ax(Asked):
    """Ax with its default generation strategy."""

    def __init__(self, task: Task, pruner: str, seed: int, plan: Plan) -> None:
        from ax.api.client import Client

        _alone("ax", pruner)
        super().__init__(task, plan)
        self._client = Client(random_seed=seed)
        logging.disable(logging.INFO)  # its own loggers write a line for each trial
        self._client.configure_experiment([_ax_parameter(*each) for each in task.space.items()])
        self._client.configure_optimization("-loss")

    def _ask(self) -> tuple[Any, Params] | None:
        for number, params in self._client.get_next_trials(1).items():
            return number, params
        return None  # all its initial points are running

    def _tell(self, asked: Any, loss: float) -> None:
        self._client.complete_trial(asked, {"loss": loss})


def _ax_parameter(name: str, distribution: BaseDistribution) -> Any:
    from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig

    if isinstance(distribution, CategoricalDistribution):
        kind = {str: "str", int: "int", float: "float", bool: "bool"}[type(distribution.choices[0])]
        return ChoiceParameterConfig(name, list(distribution.choices), kind, is_ordered=False)
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    kind = "int" if isinstance(distribution, IntDistribution) else "float"
    scaling = "log" if distribution.log else "linear"
    return RangeParameterConfig(name, (distribution.low, distribution.high), kind, scaling=scaling)


class Hebo(Asked):
    """HEBO, which ignores points that are still being trained."""

    def __init__(self, task: Task, pruner: str, seed: int, plan: Plan) -> None:
        from hebo.design_space.design_space import DesignSpace
        from hebo.optimizers.hebo import HEBO

        _alone("hebo", pruner)
        super().__init__(task, plan)
        np.random.seed(seed)  # HEBO also draws from NumPy's global generator
        space = DesignSpace().parse([_hebo_parameter(*each) for each in task.space.items()])
        self._peer = HEBO(space, scramble_seed=seed)

    def _ask(self) -> tuple[Any, Params] | None:
        point = self._peer.suggest(n_suggestions=1)
        return point, {name: _plain(value) for name, value in point.iloc[0].items()}

    def _tell(self, asked: Any, loss: float) -> None:
        self._peer.observe(asked, np.array([[loss]]))


def _hebo_parameter(name: str, distribution: BaseDistribution) -> dict[str, Any]:
    if isinstance(distribution, CategoricalDistribution):
        return {"name": name, "type": "cat", "categories": list(distribution.choices)}
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    kinds = {(False, False): "num", (False, True): "pow", (True, False): "int", (True, True): "pow_int"}
    kind = kinds[isinstance(distribution, IntDistribution), distribution.log]
    return {"name": name, "type": kind, "lb": distribution.low, "ub": distribution.high}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


class Smac(Asked):
    """SMAC with a random forest, on whole trials."""

    def __init__(self, task: Task, pruner: str, seed: int, plan: Plan) -> None:
        from smac import HyperparameterOptimizationFacade, Scenario

        _alone("smac", pruner)
        super().__init__(task, plan)
        scenario = Scenario(
            _config_space(task, seed),
            deterministic=True,
            n_trials=plan.trials or plan.budget // task.horizon,
            seed=seed,
            output_directory=tempfile.mkdtemp(prefix="smac-"),
        )
        self._peer = HyperparameterOptimizationFacade(scenario, _never, overwrite=True, logging_level=False)

    def _ask(self) -> tuple[Any, Params] | None:
        info = self._peer.ask()
        return info, {name: _plain(value) for name, value in dict(info.config).items()}

    def _tell(self, asked: Any, loss: float) -> None:
        from smac.runhistory import TrialValue

        self._peer.tell(asked, TrialValue(cost=loss))


class SmacHyperband:
    """SMAC's multi-fidelity facade: Hyperband whose new configurations a random forest proposes."""

    def __init__(self, task: Task, pruner: str, seed: int, plan: Plan) -> None:
        from smac import MultiFidelityFacade, Scenario

        _alone("smac_hyperband", pruner)
        self._task = task
        scenario = Scenario(
            _config_space(task, seed),
            deterministic=True,
            n_trials=_HYPERBAND_TRIALS * plan.budget // task.horizon,
            min_budget=1,
            max_budget=task.horizon,
            seed=seed,
            output_directory=tempfile.mkdtemp(prefix="smac-"),
        )
        self._peer = MultiFidelityFacade(scenario, _never, overwrite=True, logging_level=False)
        self._asked: dict[int, Any] = {}
        self._numbers: dict[Any, int] = {}
        self.granted: tuple[int | None, str] = (None, "")

    def free(self, trials: Sequence[Running], here: int | None) -> tuple[int | None, Params] | None:  # noqa: ARG002
        """See `Strategy`."""
        while True:
            info = self._peer.ask()
            until = max(round(info.budget), 1)
            number = self._numbers.setdefault(info.config, len(trials))
            self._asked[number], self.granted = info, (until, "")
            if number == len(trials):
                params = {name: _plain(value) for name, value in dict(info.config).items()}
                return None, _applicable(self._task, params)
            if trials[number].state == "paused" and trials[number].done < until:
                return number, {}
            self._tell(trials[number])  # it has trained these epochs, or has diverged

    def report(self, trial: Running, value: float) -> bool:
        """See `Strategy`."""
        if math.isfinite(value) and trial.done < min(trial.until or 1, self._task.horizon):
            return True
        if not math.isfinite(value):
            trial.state = "ended"
        self._tell(trial)
        return False

    def _tell(self, trial: Running) -> None:
        from smac.runhistory import TrialValue

        loss = trial.values[trial.done]
        self._peer.tell(self._asked[trial.number], TrialValue(cost=loss if math.isfinite(loss) else 1e6))


def _never(config: Any, seed: int = 0, budget: float = 0.0) -> float:  # noqa: ARG001 - SMAC reads the signature
    raise AssertionError("the study trains")


def _config_space(task: Task, seed: int) -> Any:
    import ConfigSpace

    space, known = ConfigSpace.ConfigurationSpace(seed=seed), {}
    for name, each in task.space.items():
        if isinstance(each, CategoricalDistribution):
            known[name] = ConfigSpace.Categorical(name, list(each.choices))
        elif isinstance(each, IntDistribution):
            known[name] = ConfigSpace.Integer(name, (each.low, each.high), log=each.log)
        else:
            assert isinstance(each, FloatDistribution)
            known[name] = ConfigSpace.Float(name, (each.low, each.high), log=each.log)
    space.add(*known.values())
    for name, conditions in task.conditions.items():
        for other, values in conditions.items():
            space.add(ConfigSpace.InCondition(known[name], known[other], list(values)))
    return space


class SyneTune:
    """A scheduler of Syne Tune that stops trials: BOHB, ASHACQR (conformal quantile regression)."""

    def __init__(self, kind: str, task: Task, seed: int, plan: Plan) -> None:
        import syne_tune.optimizer.baselines as made

        self._task, self._plan = task, plan
        np.random.seed(seed)  # its brackets are drawn from NumPy's global generator
        space = {name: _syne_tune_domain(each) for name, each in task.space.items()}
        self._peer = getattr(made, kind)(
            space, metric="loss", time_attr="epoch", max_t=task.horizon, random_seed=seed, grace_period=1
        )
        self._trials: list[Any] = []
        self.granted: tuple[int | None, str] = (None, "")

    def free(self, trials: Sequence[Running], here: int | None) -> tuple[int | None, Params] | None:  # noqa: ARG002
        """See `Strategy`."""
        from syne_tune.backend.trial_status import Trial

        if self._plan.trials is not None and len(trials) >= self._plan.trials:
            return None
        config = self._peer.suggest().config
        self._trials.append(Trial(trial_id=len(trials), config=config, creation_time=datetime.now()))
        self._peer.on_trial_add(self._trials[-1])
        return None, _applicable(self._task, {name: _plain(value) for name, value in config.items()})

    def report(self, trial: Running, value: float) -> bool:
        """See `Strategy`."""
        peer_trial = self._trials[trial.number]
        result = {"loss": value if math.isfinite(value) else 1e6, "epoch": trial.done}
        if trial.done == self._task.horizon:
            self._peer.on_trial_complete(peer_trial, result)
            return False
        if self._peer.on_trial_result(peer_trial, result) == "CONTINUE" and math.isfinite(value):
            return True
        self._peer.on_trial_remove(peer_trial)
        trial.state = "ended"
        return False


def _syne_tune_domain(distribution: BaseDistribution) -> Any:
    from syne_tune.config_space import choice, lograndint, loguniform, randint, uniform

    if isinstance(distribution, CategoricalDistribution):
        return choice(list(distribution.choices))
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    whole = isinstance(distribution, IntDistribution)
    made = (lograndint if distribution.log else randint) if whole else loguniform if distribution.log else uniform
    return made(distribution.low, distribution.high)


def _syne_tune(kind: str) -> Callable[[Task, str, int, Plan], Strategy]:
    def make(task: Task, pruner: str, seed: int, plan: Plan) -> Strategy:
        _alone(kind, pruner)
        return SyneTune(kind, task, seed, plan)

    return make


def _pool(name: str, kind: type[Pool]) -> Callable[[Task, str, int, Plan], Strategy]:
    def make(task: Task, pruner: str, seed: int, plan: Plan) -> Strategy:
        _alone(name, pruner)
        return kind(task, seed, plan)

    return make


def _auto_sampler(task: Task, pruner: str, seed: int, plan: Plan) -> Strategy:
    import optunahub

    package, registry = "samplers/auto_sampler", os.environ.get("HPO_HUB_REGISTRY")
    if registry is None:
        module = optunahub.load_module(package)
    else:
        module = optunahub.load_local_module(package, registry_root=str(Path(registry) / "package"))
    return Sampled(task, module.AutoSampler(seed=seed), pruner or "none", plan)


#: By name, the function that builds a strategy from a task, a pruner's name or "", a seed and a plan.
PEERS: Final[Mapping[str, Callable[[Task, str, int, Plan], Strategy]]] = MappingProxyType(
    {
        "auto_sampler": _auto_sampler,
        "ax": Ax,
        "hebo": Hebo,
        "smac": Smac,
        "smac_hyperband": SmacHyperband,
        "bohb": _syne_tune("BOHB"),
        "ashacqr": _syne_tune("ASHACQR"),
        "dyhpo": _pool("dyhpo", DyHPO),
        "dpl": _pool("dpl", DPL),
    }
)
