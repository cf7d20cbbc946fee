"""Backends by name. Importing this loads no backend; `create_backend` does, in the worker.

A backend of your own is an entry point of the group `nightshelf.backends`, or it is named by where
it is: `engine.backend: mypackage.module:thing`. Either is a `BackendSpec`, or a callable that takes
`EngineSettings` and gives a `Backend`. What can be told of it without calling it is held against
the protocol when a run is planned, the rest when it starts (docs/backends.md).
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, get_type_hints

from pydantic import ValidationError

from engine.backend import Backend, BackendFactory, BackendFacts
from engine.backends.spec import BackendSpec
from schemas.errors import (
    ConfigError,
    EngineError,
    NightshelfError,
    did_you_mean,
    is_panic,
    quoted,
)
from schemas.settings import EngineSettings

_BUILT_IN = {
    "fake": "engine.backends.fake.spec:SPEC",
    "torch": "engine.backends.torch.spec:SPEC",
    "trtllm": "engine.backends.trtllm.spec:SPEC",
}
_GROUP = "nightshelf.backends"
_METHODS = {  # of the protocol, and how many arguments each is called with
    name: len(inspect.signature(method).parameters) - 1
    for name, method in vars(Backend).items()
    if inspect.isfunction(method) and not name.startswith("_")
}


def available() -> list[str]:
    """Names that `engine.backend` may have."""
    return sorted({*_BUILT_IN, *entry_points(group=_GROUP).names})


def spec_of(name: str) -> BackendSpec:
    """What a backend says of itself. One that is no built-in is imported.

    Raises:
        ConfigError: a name that is neither known nor `module:thing`, or no backend.
        EngineError: the module cannot be imported.
    """
    installed = entry_points(group=_GROUP)
    if name in _BUILT_IN:
        found = _load(name, _BUILT_IN[name])
    elif name in installed.names:
        found = _load(name, installed[name].value)
    else:
        module, _, attribute = name.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
            raise ConfigError(
                f"engine.backend {quoted(name)} is not supported",
                expected=f"one of {', '.join(available())}, or module:callable",
                got=quoted(name) + did_you_mean(name, available()),
                field="engine.backend",
            )
        if module.partition(".")[0] in sys.stdlib_module_names:
            raise ConfigError(
                f"engine.backend {quoted(name)} makes no backend",
                expected="a callable of yours that takes the engine's settings and gives a Backend",
                got=f"module {module} of Python itself",
                field="engine.backend",
            )
        found = _load(name, name)
    return found if isinstance(found, BackendSpec) else BackendSpec(name=name, create=found)


def check_backend(engine: EngineSettings) -> BackendSpec:
    """What can be told of a backend without starting it. No built-in is imported.

    Raises:
        ConfigError: no such backend; a callable that does not take the settings; a class without
            the methods of engine/backend.py; `engine.options` that it does not take.
        EngineError: its module cannot be imported.
    """
    name = engine.backend
    spec = spec_of(name)
    _check_options(spec, engine.options)
    if name in _BUILT_IN:
        return spec
    factory = _load(name, spec.create) if isinstance(spec.create, str) else spec.create
    if not callable(factory) or not _takes(factory, 1):
        raise ConfigError(
            f"engine.backend {quoted(name)} makes no backend",
            expected="a callable that takes one argument, the engine's settings",
            got=_described(factory),
            field="engine.backend",
        )
    made = factory if isinstance(factory, type) else _annotated(factory)
    if made is not None:
        problem = _lacking(made)
        if problem is not None:
            raise ConfigError(
                f"engine.backend {quoted(name)} is no backend",
                expected="the methods of Backend in engine/backend.py",
                got=f"{made.__name__}{problem}",
                field="engine.backend",
            )
    return spec


def create_backend(settings: EngineSettings) -> Backend:
    """Load the backend that the settings name.

    Raises:
        ConfigError: no such backend.
        EngineError: its packages are not installed, it cannot start here, or it is no backend.
    """
    spec = check_backend(settings)
    factory: BackendFactory = (
        _load(spec.name, spec.create) if isinstance(spec.create, str) else spec.create
    )
    try:
        backend = factory(settings)
    except SystemExit as err:  # of a script that was written to be run alone
        raise EngineError(
            f"backend {quoted(settings.backend)} ended the process when it was called",
            got=f"SystemExit: {quoted(err.code)}"[:300],
            do="Let it raise an error that says what is wrong.",
        ) from err
    problem = _lacking(backend)
    if problem is None and not isinstance(getattr(backend, "facts", None), BackendFacts):
        problem = ".facts is not a BackendFacts"
    if problem is not None:
        raise EngineError(
            f"what engine.backend {quoted(settings.backend)} made is no backend",
            expected="what Backend in engine/backend.py says",
            got=f"{type(backend).__name__}{problem}",
        )
    return backend


def _check_options(spec: BackendSpec, options: dict[str, Any]) -> None:
    if spec.settings is None:
        if options:
            raise ConfigError(
                f"backend {quoted(spec.name)} takes no engine.options",
                expected="no such setting",
                got=", ".join(options),
                field="engine.options",
            )
        return
    try:
        spec.settings.model_validate(options)
    except ValidationError as err:
        wrong = err.errors()[0]
        where = ".".join(["engine.options", *map(str, wrong["loc"])])
        raise ConfigError(
            f"{where}: {wrong['msg']}", got=quoted(wrong["input"]), field=where
        ) from None


def _load(name: str, place: str) -> Any:
    """What stands at `module:attribute`."""
    module, _, attribute = place.partition(":")
    try:
        found = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except BaseException as err:  # whatever the module does when it is imported
        theirs = isinstance(err, Exception | SystemExit) or is_panic(err)
        if isinstance(err, NightshelfError) or not theirs:
            raise
        raise EngineError(
            f"backend {quoted(name)} cannot be loaded",
            got=f"{type(err).__name__}: {err}",
            do="Install its packages (pip install 'nightshelf[torch]') or correct engine.backend.",
        ) from err
    return found


def _annotated(factory: Any) -> type | None:
    """The class that a factory says it returns, if it is one that can be looked at."""
    try:
        made = get_type_hints(factory).get("return")
    except Exception:  # an annotation that exists for a type checker alone
        return None
    return made if isinstance(made, type) and made is not Backend else None


def _lacking(made: Any) -> str | None:
    """What a backend, or a class of backends, lacks; None: nothing that can be seen."""
    unbound = isinstance(made, type)
    for name, arguments in _METHODS.items():
        method = getattr(made, name, None)
        if not callable(method):
            return f" has no method {name}"
        if not _takes(method, arguments + (unbound and inspect.isfunction(method))):
            return f".{name} does not take {arguments} arguments: {_described(method)}"
    return None


def _takes(function: Any, arguments: int) -> bool:
    """Whether a call with so many positional arguments is one that it accepts."""
    try:
        inspect.signature(function).bind(*[None] * arguments)
    except TypeError:
        return False
    except ValueError:  # written in C, without a signature
        return True
    return True


def _described(thing: Any) -> str:
    try:
        return f"{getattr(thing, '__name__', type(thing).__name__)}{inspect.signature(thing)}"
    except (TypeError, ValueError):
        return quoted(thing)
