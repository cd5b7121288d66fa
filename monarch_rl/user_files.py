"""Code of the user's that the configuration names as `path/to/file.py:NAME`."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from monarch_rl.config import UserError
from monarch_rl.trainer_config import nearest


def load_attribute(key: str, spec: str) -> Any:
    """What `spec` names; `key` is what it was given for.

    Raises:
        UserError: that begins with `key=spec`: there is no such file, it cannot be imported, or has no such attribute.
    """
    file, _, attribute = spec.rpartition(":")
    module = _import_file(Path(file), f"{key}={spec}")
    if not hasattr(module, attribute):
        raise UserError(f"{key}={spec}: {file} has no attribute {attribute!r}{nearest(attribute, vars(module))}")
    return getattr(module, attribute)


def _import_file(file: Path, said: str) -> ModuleType:
    """Registers the module under a name made from the path, so that its classes can be pickled between processes."""
    if not file.is_file():
        raise UserError(f"{said}: there is no file {file}")
    file = file.resolve()
    name = f"user_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    if name in sys.modules:
        return sys.modules[name]
    origin = importlib.util.spec_from_file_location(name, file)
    assert origin is not None  # for a .py file there always is one
    assert origin.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(origin)
    try:
        origin.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"{said}: {file} cannot be imported: {type(error).__name__}: {error}") from error
    return module
