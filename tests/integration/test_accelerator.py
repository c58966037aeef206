"""A machine on which torch sees an accelerator: what is forked there must be able to train.

A registered device guard stands in for one. Torch then starts a thread for each device at the first backward pass
of a process, and a process forked after that can't run one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from tests.support.commands import hpo_json, make_study

pytestmark = pytest.mark.full

# Loaded before anything else, in the fork server and its workers too.
SITE = """
import ctypes
ctypes.CDLL({library!r})
"""

DATA = """
import torch
import parts

def trained():
    "Data that a model makes: a backward pass starts the threads of the devices."
    weight = torch.nn.Parameter(torch.ones(1))
    (weight * 2).sum().backward()
    return parts.load()
"""


@pytest.fixture(scope="module")
def with_accelerator(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process whose torch sees one accelerator."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++ to build the stand-in")
    folder = tmp_path_factory.mktemp("guard")
    library = folder / "guard.so"
    source = Path(__file__).with_name("device_guard.cpp")
    paths = [f"-I{path}" for path in cpp_extension.include_paths()]
    lib = Path(torch.__file__).parent / "lib"
    links = [f"-L{lib}", f"-Wl,-rpath,{lib}", "-lc10"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = ["g++", "-shared", "-fPIC", "-std=c++20", abi, *paths, str(source), "-o", str(library), *links]
    subprocess.run(command, check=True)
    (folder / "sitecustomize.py").write_text(SITE.format(library=str(library)))
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


FORK = """
import os, sys, torch
torch.set_num_threads(1)
if sys.argv[1] == "computes":
    (torch.nn.Parameter(torch.ones(1)) * 2).sum().backward()
else:
    import hpo.execution.launchers.preload
child = os.fork()
if not child:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight])
    (weight * weight).sum().backward()
    optimizer.step()
    print(weight.tolist()[0] < 1, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""


def forked(what: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", FORK, what]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_the_stand_in_breaks_what_is_forked_after_a_backward_pass(with_accelerator: dict[str, str]) -> None:
    assert "in combination with fork-based multiprocessing" in forked("computes", with_accelerator).stderr


def test_what_is_forked_after_the_preload_trains(with_accelerator: dict[str, str]) -> None:
    ended = forked("preload", with_accelerator)
    assert (ended.stdout, ended.stderr) == ("True\n", "")


def test_a_study_trains_on_a_machine_with_an_accelerator(tmp_path: Path, with_accelerator: dict[str, str]) -> None:
    study = make_study(tmp_path)
    (tmp_path / "made.py").write_text(DATA)
    command = [sys.executable, "-m", "hpo", "run", study, "--workers", "2", "--n-trials", "4"]
    override = "data={_target_: made.trained}"
    ended = subprocess.run(
        [*map(str, command), override], env=with_accelerator, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert hpo_json("status", study, override)["outcomes"]["complete"] == 4
