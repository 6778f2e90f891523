"""Making the class of a face: a subclass of the user's own class, on the spot, that passes for it."""

from __future__ import annotations

from typing import Any

__all__ = ['face_class']


def face_class(mixin: type, cls: type, **members: Any) -> Any:
    """Make a class that is the user's, with some methods of ours, and the user's name in checkpoints and logs.

    What belongs to one face alone is kept on its class: the ``__dict__`` may be shared with the user's object.

    Args:
        mixin (type): What the face does otherwise.
        cls (type): The user's class.
        **members (Any): Attributes of the face.

    Returns:
        Any: The class; make an instance with ``object.__new__``, which leaves the user's ``__init__`` alone.
    """
    names = {'__module__': cls.__module__, '__qualname__': cls.__qualname__, '__doc__': cls.__doc__}
    return type(cls.__name__, (mixin, cls), names | members)
