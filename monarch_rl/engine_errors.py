"""How an engine fails, and how to tell that a generator is lost."""

from __future__ import annotations

from monarch_rl.supervise import root


class EngineError(RuntimeError):
    """The engine cannot do what was asked; after a failure it can do nothing any more."""


def is_lost(error: BaseException) -> bool:
    """Whether a call to a generator failed because its process is gone, or its engine."""
    from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

    return isinstance(root(error), (EngineError, SupervisionError))
