"""Threads that read Python's source at the same time."""

import ast
import gc
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainer.syntax import syntax_tree

SOURCE = "\n".join(f"def f{number}(x):\n    return [x + ({number} * (y - 1)) for y in x]" for number in range(40))


@pytest.fixture
def switching() -> Iterator[None]:
    """Let the parser be left for another thread: it collects garbage, of which what follows hears in Python."""

    def leave(phase: str, info: dict[str, int]) -> None:
        time.sleep(0)

    before = gc.get_threshold()
    gc.set_threshold(50)
    gc.callbacks.append(leave)
    yield
    gc.callbacks.remove(leave)
    gc.set_threshold(*before)


@pytest.mark.usefixtures("switching")
def test_threads_read_sources_at_the_same_time() -> None:
    wanted = ast.dump(ast.parse(SOURCE))
    with ThreadPoolExecutor(8) as threads:
        trees = list(threads.map(lambda _: ast.dump(syntax_tree(SOURCE)), range(64)))
    assert set(trees) == {wanted}


def test_an_expression_and_what_is_none() -> None:
    assert ast.unparse(syntax_tree("a <  b", mode="eval")) == "a < b"
    with pytest.raises(SyntaxError):
        syntax_tree("a <")
