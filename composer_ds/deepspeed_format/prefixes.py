"""The wrappers that trainers put around a model, and that its names begin with."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ['wrapper_prefix']

# Lightning 1.8 to 2.0; torch's DistributedDataParallel, and Lightning before 1.8; torch.compile. Outermost first.
_PREFIXES = ('_forward_module.', 'module.', '_orig_mod.')


def wrapper_prefix(names: Iterable[str]) -> str:
    """Find what wrappers put before the names of a model.

    Args:
        names (Iterable[str]): All names of the checkpoint.

    Returns:
        str: The longest chain of wrappers that all names begin with; empty where there is none.
    """
    names, found = list(names), ''
    while names:
        prefix = next((one for one in _PREFIXES if all(name.startswith(found + one) for name in names)), '')
        if not prefix:
            break
        found += prefix
    return found
