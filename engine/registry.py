"""Backend names to loaders. Importing this loads no backend; `create_backend` does, in the worker.

A backend of your own is named by where it is: `engine.backend: mypackage.module:create`, a callable
that takes `EngineSettings` and returns a `Backend`.
"""

from __future__ import annotations

from importlib import import_module

from engine.backend import Backend, BackendFactory
from schemas.errors import ConfigError, EngineError, did_you_mean, quoted
from schemas.settings import EngineSettings

_LOADERS = {
    "fake": "engine.fake_backend:create_backend",
    "torch": "engine.torch_backend:create_backend",
    "trtllm": "engine.trtllm_backend:create_backend",
}


def available() -> list[str]:
    """Names that `engine.backend` may have."""
    return sorted(_LOADERS)


def check_backend(name: str) -> None:
    """Raise `ConfigError` for a name that is neither known nor `module:callable`."""
    if name not in _LOADERS and ":" not in name:
        raise ConfigError(
            f"engine.backend {quoted(name)} is not supported",
            expected=f"one of {', '.join(available())}, or module:callable",
            got=quoted(name) + did_you_mean(name, available()),
        )


def create_backend(settings: EngineSettings) -> Backend:
    """Load the backend that the settings name.

    Raises:
        ConfigError: no such backend.
        EngineError: its packages are not installed, or it cannot start here.
    """
    check_backend(settings.backend)
    module, _, attribute = _LOADERS.get(settings.backend, settings.backend).partition(":")
    try:
        factory: BackendFactory = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as err:
        raise EngineError(
            f"backend {quoted(settings.backend)} cannot be loaded",
            got=str(err),
            do="Install its packages (pip install 'nightshelf[torch]') or correct engine.backend.",
        ) from err
    return factory(settings)
