"""Worker processes that leave the script which starts them alone."""

from __future__ import annotations

import sys
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any


class MainlessProcess(ForkServerProcess):
    """A process that does not run the parent's ``__main__`` once more.

    Python does that for the sake of what is pickled by its name there. Workers are sent nothing of the kind, and a
    script that starts a study on its top level would start it again in each worker.
    """

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802 - multiprocessing's name
        main = sys.modules["__main__"]
        # One without a file and a spec: there is nothing to run then.
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            return ForkServerProcess._Popen(process_obj)  # noqa: SLF001
        finally:
            sys.modules["__main__"] = main


class MainlessContext(ForkServerContext):
    """The fork server's context with such processes."""

    Process = MainlessProcess
