"""CallbackRunner: orders and checks callbacks, and keeps a tuple of hooks for each event."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from trainer.callback import (
    DEFAULT_PRIORITY,
    Callback,
    FunctionCallback,
    Handle,
    TrainerView,
    check_event,
    global_callbacks,
)
from trainer.declared import check_hooks
from trainer.distributed.ranks import rank
from trainer.events import EVENT_ORDER, EVENTS, LOG_EVENTS, LOG_PRIORITY
from trainer.foreign import is_hook_name, nearest, refuse_flags
from trainer.recorded import names_in

logger = logging.getLogger(__name__)

#: The events in which a callback that ``saves`` may write a checkpoint.
SAVED_IN = ("on_train_batch_end", "on_epoch_end")

#: The base class's method of each event, by which to see that a callback does not listen.
_DEFAULTS = tuple((event, getattr(Callback, event)) for event in EVENTS)

Hook = Callable[..., Any]


class CallbackRunner:
    """Dispatches events in order of priority, then core, user, global, then insertion.

    Args:
        callbacks: The user's callbacks; or a runner of them that was built before, to which callbacks may be added
            and functions registered later as well. A trainer takes what it holds over at the start of each fit.
        core: Callbacks that the owner of the trainer adds for its own work.

    Raises:
        TypeError: A callback defines a method ``on_…`` that is no event, or a hook of another system.
        ValueError: A reader would run before its writer, a stateful callback would change after the checkpoint of
            its epoch was written, a hook sets what a resumed run would forget, or two stateful callbacks share a
            name.
    """

    def __init__(self, callbacks: Iterable[Callback] | CallbackRunner = (), core: Iterable[Callback] = ()) -> None:
        if isinstance(callbacks, Callback):
            raise TypeError(f"callbacks is one callback: write [{callbacks.name}(…)]")
        self._core: list[Callback] = list(core)
        self._user: list[Callback]
        if isinstance(callbacks, CallbackRunner):
            self._core += callbacks._core  # noqa: SLF001 - of the same class
            self._user = callbacks._user  # noqa: SLF001 - the same list, so additions to one runner are in both
        else:
            self._user = list(callbacks)
        self._hooks: dict[str, tuple[Hook, ...]] = {}
        self.resolve()

    @property
    def events(self) -> frozenset[str]:
        """Every event name."""
        return frozenset(EVENTS)

    @property
    def hooks(self) -> dict[str, tuple[Hook, ...]]:
        """The hooks of each event, as they were looked up last."""
        return self._hooks

    @property
    def callbacks(self) -> tuple[Callback, ...]:
        """All callbacks in the order in which they run."""
        ordered: list[tuple[int, int, Callback]] = []
        for origin, group in enumerate((self._core, self._user, global_callbacks())):
            ordered += [(getattr(callback, "priority", 0), origin, callback) for callback in group]
        ordered.sort(key=lambda item: item[:2])  # the sort is stable: insertion order decides between equals
        return tuple(callback for _, _, callback in ordered)

    def add(self, callbacks: Callback | Iterable[Callback]) -> Handle:
        """Add a callback, or several, to the user's; the handle takes them out again."""
        added = [callbacks] if isinstance(callbacks, Callback | type) else list(callbacks)
        before = len(self._user)
        self._user += added
        try:
            self.resolve()
        except (TypeError, ValueError):
            del self._user[before:]
            raise
        return Handle(self._user, added)

    def register(self, event: str, function: Hook, priority: int = DEFAULT_PRIORITY) -> Handle:
        """Call ``function(trainer, …)`` at ``event``; the handle takes it out again.

        Raises:
            ValueError: There is no such event; the nearest name is given.
        """
        return self.add(FunctionCallback(event, function, priority))

    def has_callbacks(self, event: str) -> bool:
        """Whether a callback listens to ``event``."""
        return bool(self.list_callbacks(event))

    def list_callbacks(self, event: str) -> tuple[Callback, ...]:
        """The callbacks that listen to ``event``, in order.

        Raises:
            ValueError: There is no such event; the nearest name is given.
        """
        check_event(event)
        return tuple(callback for callback in self.callbacks if hook_of(callback, event) is not None)

    def resolve(self) -> dict[str, tuple[Hook, ...]]:
        """Look every hook up once; a fit calls this at its start and iterates over the tuples from then on."""
        callbacks = self.callbacks
        _check_kinds(callbacks)
        _check_methods(callbacks)
        _check_names(callbacks)
        _check_order(callbacks)
        _check_saved_last(callbacks)
        check_hooks(callbacks)
        found = [hooks_of(callback) for callback in callbacks]
        self._hooks = {event: tuple(hooks[event] for hooks in found if event in hooks) for event in EVENTS}
        return self._hooks

    def state_dict(self, *, by_rank: bool = False) -> dict[str, Any]:
        """State of every stateful callback by its name, or of those whose state differs by rank."""
        return {
            callback.name: callback.state_dict()
            for callback in self.callbacks
            if _is_stateful(callback) and (callback.rank_state or not by_rank)
        }

    def redealt(self, states: Sequence[Mapping[str, Any]], rank: int) -> dict[str, Any]:
        """What a process loads of states that differ by rank and were saved by another number of processes.

        Args:
            states: Of all callbacks, by the rank of who saved them.
            rank: Of the process that loads.
        """
        return {
            callback.name: callback.redealt(
                [state[callback.name] for state in states if callback.name in state], rank
            )
            for callback in self.callbacks
            if callback.rank_state and callback.name in states[0]
        }

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


def fire_isolated(errors: list[BaseException], hooks: Iterable[Hook], trainer: TrainerView, *args: Any) -> None:
    """Call every hook, even if one fails; append the errors in order."""
    for hook in hooks:
        try:
            if (returned := hook(trainer, *args)) is not None:
                refuse_flags(hook, returned)
        except BaseException as error:  # noqa: BLE001 - the caller raises the first of them
            errors.append(error)


def attempt(errors: list[BaseException], action: Callable[..., None], *args: Any) -> None:
    """Call ``action``; append its error, if it raises one."""
    try:
        action(*args)
    except BaseException as error:  # noqa: BLE001 - the caller raises the first of them
        errors.append(error)


def raise_first(errors: list[BaseException]) -> None:
    """Raise the first of a run's errors, type unchanged, if there is one, and log the others.

    Empties the list: an error's traceback keeps the variables of all functions on its way, such as a batch's
    activations. A list among them that still had the error would keep all of it until the next garbage collection.
    """
    try:
        for number in range(1, len(errors)):
            logger.error("another error at the end of the run", exc_info=errors[number])
        if errors:
            raise errors[0]
    finally:
        errors.clear()


def hooks_of(callback: Callback) -> dict[str, Hook]:
    """The hooks of a callback in this process, by event."""
    if callback.rank_zero_only and rank():
        return {}
    if isinstance(callback, FunctionCallback):
        return {callback.event: callback.function}
    kind, own = type(callback), vars(callback)
    return {
        event: getattr(callback, event)
        for event, default in _DEFAULTS
        if event in own or getattr(kind, event) is not default
    }


def hook_of(callback: Callback, event: str) -> Hook | None:
    """The hook of a callback for an event in this process, or None."""
    return hooks_of(callback).get(event)


def name_of(hook: Hook) -> str:
    """Name of the callback whose hook this is, or of the registered function."""
    owner = getattr(hook, "__self__", None)
    return owner.name if isinstance(owner, Callback) else getattr(hook, "__qualname__", repr(hook))


def _check_kinds(callbacks: Iterable[Any]) -> None:
    for callback in callbacks:
        if not isinstance(callback, Callback):
            hint = f"write {callback.__name__}(…)" if isinstance(callback, type) else "derive it from Callback"
            raise TypeError(f"{callback!r} is not a callback: {hint}")


def _check_methods(callbacks: Iterable[Callback]) -> None:
    for callback in callbacks:
        kind = type(callback)
        for attribute in dir(kind):
            if attribute not in EVENTS and is_hook_name(attribute):
                raise TypeError(f"{kind.__name__}.{attribute} is not the name of an event{nearest(attribute)}")
        if isinstance(callback, FunctionCallback):
            _check_arguments(callback.event, callback.function, bound=True)
        for event, default in _DEFAULTS:
            if (hook := getattr(kind, event)) is not default and inspect.isfunction(hook):
                static = isinstance(inspect.getattr_static(kind, event), staticmethod)
                _check_arguments(event, hook, bound=static)


def _check_arguments(event: str, hook: Hook, *, bound: bool) -> None:
    """Refuse a hook that can't be called with the arguments of its event, before the event fires."""
    arguments = getattr(Callback, event).__code__.co_varnames[bound:]
    code = hook.__code__ if inspect.isfunction(hook) else None
    if code is not None and code.co_argcount == len(arguments) and not code.co_kwonlyargcount:
        return  # the usual case, without the slower check
    try:
        inspect.signature(hook).bind(*arguments)
    except ValueError:
        return  # a C function may have no signature
    except TypeError as error:
        name = getattr(hook, "__qualname__", repr(hook))
        raise TypeError(
            f"{name} can't be called at {event}: {error}; let it take ({', '.join(arguments)})"
        ) from error


def _check_names(callbacks: Iterable[Callback]) -> None:
    seen: set[str] = set()
    objects: set[int] = set()
    for callback in callbacks:
        if id(callback) in objects:
            raise ValueError(f"the same {callback.name} is there twice: its hooks would run twice")
        objects.add(id(callback))
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
    """A key that sorts by time; the log events fire inside ``on_epoch_end``, whatever the listener's priority."""
    if event in LOG_EVENTS:
        return EVENT_ORDER["on_epoch_end"], LOG_PRIORITY, EVENT_ORDER[event]
    return EVENT_ORDER[event], callback.priority, position


def _check_saved_last(callbacks: tuple[Callback, ...]) -> None:
    """Refuse a callback that may change its state after a checkpoint was written, which would then lack it."""
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
        if writer is reader or not writer.writes or not reader.reads:
            continue
        if any(_is_written(read, write) for read in names_in(reader.reads) for write in names_in(writer.writes)):
            yield position, writer


def _is_written(read: str, write: str) -> bool:
    # Compiling a pattern takes longer than everything else here, and most names are no patterns.
    return read in (write, "*") or (any(sign in write for sign in "*?[") and fnmatchcase(read, write))
