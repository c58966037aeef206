"""CallbackRunner: orders callbacks, refuses wrong ones, and keeps a tuple of hooks for each event."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from trainer.callback import DEFAULT_PRIORITY, Callback, FunctionCallback, Handle, TrainerView, global_callbacks
from trainer.distributed.ranks import rank
from trainer.events import EVENT_ORDER, EVENTS, LOG_EVENTS, LOG_PRIORITY

logger = logging.getLogger(__name__)

#: The events in which a callback that ``saves`` may write a checkpoint.
SAVED_IN = ("on_train_batch_end", "on_epoch_end")

Hook = Callable[..., None]


class CallbackRunner:
    """Dispatches events in order of priority, then core, user, global, then insertion.

    Args:
        callbacks: The user's callbacks.
        core: Callbacks that the owner of the trainer adds for its own work.

    Raises:
        TypeError: A callback defines an ``on_…`` method that is no event.
        ValueError: A reader would run before its writer, a stateful callback would change after the checkpoint of
            its epoch was written, or two stateful callbacks share a name.
    """

    def __init__(self, callbacks: Iterable[Callback] = (), core: Iterable[Callback] = ()) -> None:
        if isinstance(callbacks, Callback):
            raise TypeError(f"callbacks is one callback: write [{callbacks.name}(…)]")
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
            ordered += [(getattr(callback, "priority", 0), origin, callback) for callback in group]
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
        _check_event(event)
        return self.add(FunctionCallback(event, function, priority))

    def has_callbacks(self, event: str) -> bool:
        """Whether a callback listens to ``event``."""
        return bool(self.list_callbacks(event))

    def list_callbacks(self, event: str) -> tuple[Callback, ...]:
        """The callbacks that listen to ``event``, in order.

        Raises:
            ValueError: There is no such event; the nearest name is given.
        """
        _check_event(event)
        return tuple(callback for callback in self.callbacks if hook_of(callback, event) is not None)

    def resolve(self) -> dict[str, tuple[Hook, ...]]:
        """Look every hook up once; a fit calls this at its start and iterates over the tuples from then on."""
        callbacks = self.callbacks
        _check_kinds(callbacks)
        _check_methods(callbacks)
        _check_names(callbacks)
        _check_order(callbacks)
        _check_saved_last(callbacks)
        self._hooks = {
            event: tuple(hook for callback in callbacks if (hook := hook_of(callback, event)) is not None)
            for event in EVENTS
        }
        return self._hooks

    def state_dict(self) -> dict[str, Any]:
        """State of every stateful callback by its name."""
        return {callback.name: callback.state_dict() for callback in self.callbacks if _is_stateful(callback)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand each saved state to the callback of that name; one that no callback takes is a warning."""
        unknown = state.keys() - {callback.name for callback in self.callbacks}
        if unknown:
            logger.warning(
                "the checkpoint holds state of %s, which this run does not have", ", ".join(sorted(unknown))
            )
        for callback in self.callbacks:
            if callback.name in state:
                callback.load_state_dict(state[callback.name])

    def describe(self) -> str:
        """The resolved order, one ``priority name`` a line."""
        return "\n".join(f"{callback.priority:>4} {callback.name}" for callback in self.callbacks)


def fire_isolated(hooks: Iterable[Hook], trainer: TrainerView, *args: Any) -> list[BaseException]:
    """Call every hook even if one fails; returns the errors in order."""
    errors: list[BaseException] = []
    for hook in hooks:
        try:
            hook(trainer, *args)
        except BaseException as error:  # noqa: BLE001 - the caller raises the first of them
            errors.append(error)
    return errors


def hook_of(callback: Callback, event: str) -> Hook | None:
    """What a callback wants called at an event in this process, or None."""
    if callback.rank_zero_only and rank():
        return None
    if isinstance(callback, FunctionCallback):
        return callback.function if callback.event == event else None
    hook: Hook = getattr(callback, event)
    return None if getattr(hook, "__func__", None) is getattr(Callback, event) else hook


def name_of(hook: Hook) -> str:
    """Name of the callback whose hook this is, or of the registered function."""
    owner = getattr(hook, "__self__", None)
    return owner.name if isinstance(owner, Callback) else getattr(hook, "__qualname__", repr(hook))


def _check_event(event: str) -> None:
    if event not in EVENTS:
        raise ValueError(f"no event is called {event!r}{_nearest(event)}")


def _nearest(name: str) -> str:
    close = difflib.get_close_matches(name, EVENTS, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; the events are {', '.join(EVENTS)}"


def _check_kinds(callbacks: Iterable[Any]) -> None:
    for callback in callbacks:
        if not isinstance(callback, Callback):
            hint = f"write {callback.__name__}(…)" if isinstance(callback, type) else "derive it from Callback"
            raise TypeError(f"{callback!r} is no callback: {hint}")


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
        if not _is_stateful(callback):
            continue
        if callback.name in seen:
            raise ValueError(f"two callbacks keep state under the name {callback.name!r}: give one its own `name`")
        seen.add(callback.name)


def _check_order(callbacks: tuple[Callback, ...]) -> None:
    for position, reader in enumerate(callbacks):
        for writer_position, writer in _writers(callbacks, reader):
            written = _moment(writer, writer.writes_in, writer_position)
            if written > _moment(reader, reader.reads_in, position):
                raise ValueError(
                    f"{reader.name} (priority {reader.priority}, {reader.reads_in}) reads what {writer.name} "
                    f"(priority {writer.priority}, {writer.writes_in}) writes later: give {writer.name} a "
                    f"priority below {reader.priority}"
                )


def _moment(callback: Callback, event: str, position: int) -> tuple[int, int, int]:
    """Something that sorts as time does: the log events fire inside ``on_epoch_end``, for any listener."""
    if event in LOG_EVENTS:
        return EVENT_ORDER["on_epoch_end"], LOG_PRIORITY, EVENT_ORDER[event]
    return EVENT_ORDER[event], callback.priority, position


def _check_saved_last(callbacks: tuple[Callback, ...]) -> None:
    """A change of state after the checkpoint was written would be missing from it."""
    for event in SAVED_IN:
        saver = next((item for item in callbacks if item.saves and hook_of(item, event)), None)
        if saver is None:
            continue
        for callback in callbacks[callbacks.index(saver) + 1 :]:
            if _is_stateful(callback) and hook_of(callback, event):
                raise ValueError(
                    f"{callback.name} (priority {callback.priority}) has state and would change it in {event} "
                    f"after {saver.name} (priority {saver.priority}) has saved it: give it a priority below "
                    f"{saver.priority}"
                )


def _is_stateful(callback: Callback) -> bool:
    return type(callback).state_dict is not Callback.state_dict


def _writers(callbacks: tuple[Callback, ...], reader: Callback) -> Iterator[tuple[int, Callback]]:
    for position, writer in enumerate(callbacks):
        if writer is reader or not writer.writes:
            continue
        if any(fnmatchcase(read, write) or read == "*" for read in reader.reads for write in writer.writes):
            yield position, writer
