"""The extensions that DeepSpeed compiles at first use: whether they are there, and locks that a killed compile left."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from composer_ds.announcements import announce, describe_duration

__all__ = ['announce_old_locks', 'is_compiled']

# Each of DeepSpeed's extensions takes about a minute, on a busy machine a few.
_LONGEST_COMPILE_SEC = 5 * 60.0


def is_compiled(extension: str) -> bool:
    """Whether an extension lies where torch looks for it, compiled for any version.

    Args:
        extension (str): Its name, such as ``deepspeed_shm_comm``.

    Returns:
        bool: Whether there is a library of that name.
    """
    library = f'{extension}/{extension}*.so'
    return any(next(_root().glob(pattern), None) for pattern in (library, f'*/{library}'))


def announce_old_locks() -> None:
    """Name the locks that nobody may hold any more. Called on every rank before extensions are loaded; rank 0 speaks.

    torch (``torch.utils.file_baton.FileBaton``) waits without a word and without end for the file ``lock`` of an
    extension to vanish, also when the extension is compiled. A compile that was killed leaves it behind. It is not
    removed here, because a compiler on another machine that shares the folder could hold it. In newer torch (2.15, say)
    the system gives a lock back when its process ends, and the file means nothing.
    """
    from torch.utils import cpp_extension  # prints something when it is imported: see deepspeed_output

    if not hasattr(cpp_extension, 'FileBaton'):
        return
    # Without the variable torch has a folder for each version of Python and CUDA, such as py311_cpu.
    ours = f'py{sys.version_info.major}{sys.version_info.minor}*/*/lock'
    for lock in sorted(_root().glob('*/lock' if os.environ.get('TORCH_EXTENSIONS_DIR') else ours)):
        try:
            age_sec = time.time() - lock.stat().st_mtime
        except OSError:  # removed meanwhile, by the compile that has ended
            continue
        if age_sec > _LONGEST_COMPILE_SEC:
            announce(
                f'{lock} is {describe_duration(age_sec)} old: torch waits for it to vanish, without end, when it loads '
                'this extension. A compile that was killed leaves it behind: remove the file when no compiler runs.'
            )


def _root() -> Path:
    from torch.utils import cpp_extension

    return Path(os.environ.get('TORCH_EXTENSIONS_DIR') or cpp_extension.get_default_build_root())
