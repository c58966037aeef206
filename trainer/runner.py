"""CallbackRunner: orders callbacks, refuses wrong ones, and keeps a tuple of hooks for each event."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from trainer.callback import DEFAULT_PRIORITY, Callback, FunctionCallback, Handle, TrainerView, global_callbacks
from trainer.events import EVENT_ORDER, EVENTS

Hook = Callable[..., None]


class CallbackRunner:
    """Dispatches events in order of priority, then core, user, global, then insertion.

    Args:
        callbacks: The user's callbacks.
        core: Callbacks that the owner of the trainer adds for its own work.

    Raises:
        TypeError: A callback defines an ``on_…`` method that is no event.
        ValueError: A reader would run before its writer, or two stateful callbacks share a name.
    """

    def __init__(self, callbacks: Iterable[Callback] = (), core: Iterable[Callback] = ()) -> None:
        self._core = list(core)
        self._user = list(callbacks)
        self._hooks: dict[str, tuple[Hook, ...]] = {}
        self.resolve()

    @property
    def events(self) -> frozenset[str]:
        """Every event name."""
        return frozenset(EVENTS)

    @property
    def callbacks(self) -> tuple[Callback, ...]:
        """All callbacks in the order in which they run."""
        ordered: list[tuple[int, int, Callback]] = []
        for origin, group in enumerate((self._core, self._user, global_callbacks())):
            ordered += [(callback.priority, origin, callback) for callback in group]
        ordered.sort(key=lambda item: item[:2])  # the sort is stable: insertion order decides between equals
        return tuple(callback for _, _, callback in ordered)

    def add(self, callback: Callback) -> Handle:
        """Add a callback to the user's; the handle takes it out again."""
        self._user.append(callback)
        try:
            self.resolve()
        except (TypeError, ValueError):
            self._user.pop()
            raise
        return Handle(self._user, callback)

    def register(self, event: str, function: Hook, priority: int = DEFAULT_PRIORITY) -> Handle:
        """Call ``function(trainer, …)`` at ``event``; the handle takes it out again.

        Raises:
            ValueError: There is no such event; the nearest name is given.
        """
        if event not in EVENTS:
            raise ValueError(f"no event is called {event!r}{_nearest(event)}")
        return self.add(FunctionCallback(event, function, priority))

    def has_callbacks(self, event: str) -> bool:
        """Whether anybody listens to ``event``."""
        return bool(self.list_callbacks(event))

    def list_callbacks(self, event: str) -> tuple[Callback, ...]:
        """The callbacks that listen to ``event``, in order."""
        return tuple(callback for callback in self.callbacks if _hook(callback, event) is not None)

    def resolve(self) -> dict[str, tuple[Hook, ...]]:
        """Look every hook up once; a fit calls this at its start and iterates over the tuples from then on."""
        callbacks = self.callbacks
        _check_methods(callbacks)
        _check_names(callbacks)
        _check_order(callbacks)
        self._hooks = {
            event: tuple(hook for callback in callbacks if (hook := _hook(callback, event)) is not None)
            for event in EVENTS
        }
        return self._hooks

    def fire_isolated(self, event: str, trainer: TrainerView, *args: Any) -> list[BaseException]:
        """Call every hook of ``event`` even if one fails; returns the errors in order."""
        errors: list[BaseException] = []
        for hook in self._hooks[event]:
            try:
                hook(trainer, *args)
            except BaseException as error:  # noqa: BLE001 - the caller raises the first of them
                errors.append(error)
        return errors

    def state_dict(self) -> dict[str, Any]:
        """State of every stateful callback by its name."""
        return {callback.name: state for callback in self.callbacks if (state := callback.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand each saved state to the callback of that name; a name that nobody has is passed over."""
        for callback in self.callbacks:
            if callback.name in state:
                callback.load_state_dict(state[callback.name])

    def describe(self) -> str:
        """The resolved order, one ``priority name`` a line."""
        return "\n".join(f"{callback.priority:>4} {callback.name}" for callback in self.callbacks)


def _hook(callback: Callback, event: str) -> Hook | None:
    if isinstance(callback, FunctionCallback):
        return callback.function if callback.event == event else None
    hook: Hook = getattr(callback, event)
    return None if getattr(hook, "__func__", None) is getattr(Callback, event) else hook


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, EVENTS, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; the events are {', '.join(EVENTS)}"


def _check_methods(callbacks: Iterable[Callback]) -> None:
    for callback in callbacks:
        for attribute in dir(type(callback)):
            if attribute.startswith("on_") and attribute not in EVENTS:
                raise TypeError(
                    f"{type(callback).__name__}.{attribute} is not the name of an event{_nearest(attribute)}"
                )


def _check_names(callbacks: Iterable[Callback]) -> None:
    seen: set[str] = set()
    for callback in callbacks:
        if type(callback).state_dict is Callback.state_dict:
            continue
        if callback.name in seen:
            raise ValueError(f"two callbacks keep state under the name {callback.name!r}: give one its own `name`")
        seen.add(callback.name)


def _check_order(callbacks: tuple[Callback, ...]) -> None:
    for position, reader in enumerate(callbacks):
        for writer_position, writer in _writers(callbacks, reader):
            if (EVENT_ORDER[writer.writes_in], writer_position) > (EVENT_ORDER[reader.reads_in], position):
                raise ValueError(
                    f"{reader.name} (priority {reader.priority}, {reader.reads_in}) reads what {writer.name} "
                    f"(priority {writer.priority}, {writer.writes_in}) writes later: give {writer.name} a "
                    f"priority below {reader.priority}"
                )


def _writers(callbacks: tuple[Callback, ...], reader: Callback) -> Iterator[tuple[int, Callback]]:
    for position, writer in enumerate(callbacks):
        if writer is reader or not writer.writes:
            continue
        if "*" in reader.reads or set(writer.writes) & set(reader.reads):
            yield position, writer
